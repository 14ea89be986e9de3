"""Levels 1 and 2: a scheduler's batches and requests, for engines whose loop may overlap.

Written for a decode step of a fast engine, with one observer each for the launch of a batch and for the
processing of its result, for requests and steps together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any

from sgl_aspects.engines import Engine, Role
from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing.context import bridge_opentelemetry
from sgl_aspects.tracing.lifecycle import Step, Trackers
from sgl_aspects.tracing.lifecycle.requests import Chunk, ScheduledRequest
from sgl_aspects.tracing.lifecycle.steps import StepTracker, figure, usage_figure
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.records import error_type

# Disaggregated engines schedule in functions of their own.
_SCHEDULES = ("schedule", "schedule_prefill", "schedule_decode")


class StepObserver(native.StepPath):
    """Reports to both trackers when a batch is scheduled, launched, and its result processed.

    The compiled path (:mod:`..record.native`), where available, handles plain decode steps and calls these
    methods for the others.
    """

    tracker: StepTracker
    busy: Any
    mode: Any
    reqs: Any

    def __init__(self, trackers: Trackers) -> None:
        engine = trackers.engine
        self._recorder = trackers.recorder
        self.tracker, self._requests = trackers.steps, trackers.requests
        self.slots = getattr(trackers.recorder, "slots", None)
        self.requests, self.preempted = trackers.requests.requests, trackers.requests.preempted_requests
        self.measures = trackers.options.measures
        self.busy = None  # the scheduler whose idling is not reported yet
        call, reader = engine.call_reader, engine.reader
        self._ran = call("run_batch", "batch")
        #: Whether a function processes the results of batches; otherwise a step ends with its run.
        self._is_processed = "process_batch_result" in engine.roles
        self._processing = call("process_batch_result", "scheduler")
        self._processed_batch = call("process_batch_result", "batch")
        self._result = call("process_batch_result", "result")
        self._receiving = call("receive_messages", "scheduler")
        each = engine.values_reader("batch", ("mode", "reqs"))
        self._summary = engine.reader("batch.summary") if engine.has("batch.summary") else each
        self._mode_name = reader("mode.name") if engine.has("mode.name") else str
        self._is_speculative = reader("mode.is_speculative")
        self._rid = reader("req.rid")
        self._num_tokens = reader("batch.num_tokens")
        self._prefills = reader("batch.prefills")
        self._is_middle_chunk = reader("req.is_middle_chunk")
        self._is_prefill_only = reader("req.is_prefill_only")
        self._finished = reader("batch.finished") if engine.has("batch.finished") else None
        self._finish_reason = reader("req.finish_reason")
        self._outcome = engine.outcome
        self._output_tokens = reader("req.output_tokens")
        self._drafts = reader("req.drafts")
        self._verifying, self._verified = call("process_batch_result", "drafts"), reader("result.drafts")
        self._step_number = reader("batch.step_id")
        self._shared_id = reader("batch.shared_id") if engine.has("batch.shared_id") else None
        self._queues = engine.values_reader("scheduler", ("waiting", "running"))
        self._kv_usage = reader("scheduler.kv_usage")
        self._is_idle = reader("scheduler.is_idle")
        # Whether requests of a batch have ended is checked after the engine has released one; after each step
        # for engines without such a call.
        self._checks_always = True
        self.tracker.finishing = self._finished is not None
        # Times of release: callers may have the answer before the result is processed.
        self._released = call("release_request", "req")
        self._released_ns: dict[str, int] = {}
        # For the compiled path: positions of arguments, and what to read of a batch, the name of an attribute
        # or a function of the batch.
        self.ran_at = engine.position("run_batch", "batch")
        self.processing_at = engine.position("process_batch_result", "scheduler")
        self.processed_at = engine.position("process_batch_result", "batch")
        self.result_at = engine.position("process_batch_result", "result")
        names = ("summary", "mode", "reqs", "step_id", "shared_id")
        sources = [self._source(engine, f"batch.{name}") for name in names]
        repeats = engine.repeats
        self._decoding = None if repeats is None else operator.attrgetter(f"{repeats.of}.{repeats.ids}")
        if repeats is not None:
            self.repeat_of, self.repeat_ids = repeats.of, repeats.ids
            self.repeat_count, self.repeat_unless = repeats.count, repeats.unless
        drafts, processing = engine.drafts, engine.roles.get("process_batch_result", Role(()))
        # A name: read in C; True: in Python; None: there are none.
        self.drafts_of = drafts.of or "drafts" in processing.arguments or None
        self.drafts_each = drafts.each or engine.has("result.drafts") or None
        self.drafts_rows, self.drafts_row_of, self.drafts_width = drafts.rows, drafts.row_of, drafts.width
        self.drafts_unless = drafts.unless
        self.drafts: dict[Any, Any] | None = None  # of these requests, as they count
        self.decoding: list[Any] | None = None  # the ids of the latest batch, if it only decodes
        self.summary_source, self.mode_source, self.reqs_source, self.number_source, self.id_source = sources
        # Of the latest batch: most decode steps repeat it.
        self.mode = self.reqs = None
        self._mode_text = ""
        #: Whether the compiled path may take batches of this mode; whether these have no drafts.
        self.decodes = self._is_plain = False
        self.size = 0
        self._served: list[tuple[Any, ScheduledRequest]] = []
        # Queues and KV usage at ``read_ns``, with ``known`` requests; encoded for storage.
        self.read_ns = self.known = self.waiting = self.running = self.usage = 0

    def _source(self, engine: Engine, name: str) -> Any:
        source = engine.attributes.get(name)
        is_path = isinstance(source, str) and not source.isidentifier()
        return engine.reader(name) if is_path else source

    def observations(self) -> list[Observation]:
        in_python = "" if native.compiled is not None and self._is_processed else "_"
        parts = {
            "run_batch": "run",
            "process_batch_result": "process",
            **dict.fromkeys(_SCHEDULES, "schedule"),
        }
        return [
            Observation("receive_messages", self._receive_enter),
            Observation("release_request", self._release_enter),
            *(
                Observation(
                    role,
                    getattr(self, f"{in_python}{part}_enter"),
                    getattr(self, f"{in_python}{part}_exit"),
                    caller=native.WatchedCall,
                )
                for role, part in parts.items()
            ),
        ]

    # -- scheduled ------------------------------------------------------------------------------------------

    def _schedule_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return monotonic_ns()

    def _schedule_exit(self, start_ns: int, result: Any, error: BaseException | None) -> None:
        # A scheduler without work gets here thousands of times a second.
        tracker = self.tracker
        # The last schedule led to no batch, or this one does not; some engines return an object in any case.
        if tracker.schedule_start or result is None:
            if tracker.details:
                tracker.drop_details(math.inf if result is None else tracker.schedule_end)
            if not tracker.in_flight:
                self._report_idle()
        tracker.schedule_start, tracker.schedule_end = start_ns, monotonic_ns()

    def _receive_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        is_open = self.busy is not None or self.tracker.late or self.requests
        if is_open and self._is_idle(self._receiving(args, kwargs)):
            self._report_idle()

    def _report_idle(self) -> None:
        """End the last step, and report the idle scheduler to the metrics."""
        self._end_unreported()
        self.reqs, self.size, self._served = None, 0, []
        if self.tracker.late:
            self.tracker.read_late()
        scheduler, self.busy = self.busy, None
        if scheduler is not None:
            waiting, _ = self._queues(scheduler)
            self.tracker.idle(waiting, 0, self._kv_usage(scheduler))

    # -- launched -------------------------------------------------------------------------------------------

    def _run_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        now = monotonic_ns()
        batch = self._ran(args, kwargs)
        summary = None if batch is None else self._summary(batch)
        if summary is None:
            return None  # an empty batch
        mode, reqs = summary
        if mode is not self.mode:
            self._meet_mode(mode)
        size = len(reqs) if reqs else 0
        requests = self._requests
        prefill: list[Chunk] | None = None
        if not self._is_plain:
            prefill = self._launch_prompts(batch, now)
            tokens = self._num_tokens(batch)
        else:
            tokens = size
            if requests.preempted_requests:
                self._resume(reqs, now)
        tracker = self.tracker
        if reqs is not self.reqs or size != self.size:
            self._link(reqs, size)
        if self._decoding is not None:
            self.decoding = [*self._decoding(batch)] if self.decodes and not prefill else None
            known = requests.requests
            found = {rid: known[rid].drafts if rid in known else None for rid in self.decoding or ()}
            self.drafts = found if self.drafts_of is not None else None
        shared_id = 0 if self._shared_id is None or tracker.has_passes else self._shared_id(batch) or 0
        step = tracker.begin(now, batch, self._mode_text, size, tokens, shared_id)
        has_drafts = self.drafts_of is not None and tokens != size and bool(requests.requests)
        if step is None and (prefill or has_drafts):
            step = tracker.begin_unrecorded(batch)
        if step is not None and prefill:
            step.prefill = prefill
        return step

    def _run_exit(self, step: Step | None, result: Any, error: BaseException | None) -> None:
        if step is None:
            return
        now = monotonic_ns()
        step.words[step.block + layout.RUN_END] = now
        step.words[step.block + layout.STEP_NUMBER] = figure(self._step_number(step.batch))
        if error is None and self._is_processed:
            self.tracker.launched(step, result)
            return
        problem = error_type(error)
        if step.prefill:
            self._requests.prefilled(step.prefill, problem)
        if problem:
            self.tracker.fail(step, 1 << layout.CHILD_RUN_BATCH, problem)
        self.tracker.end(step, now)

    def _meet_mode(self, mode: Any) -> None:
        self.mode = mode
        self._mode_text = str(self._mode_name(mode))
        is_decode, drafts = self._mode_text == "decode", bool(self._is_speculative(mode))
        self._is_plain = is_decode and not drafts
        self.decodes = is_decode and (not drafts or isinstance(self.drafts_of, str))

    def _launch_prompts(self, batch: Any, now: int) -> list[Chunk]:
        """Close the queue phase of the requests that a batch prefills."""
        chunks = []
        for req, tokens, is_last in self._prefills(batch) or ():
            request = self._requests.requests.get(self._rid(req))
            if request is None or request.decodes or request.problem:
                continue  # not traced, decoded in a batch with others' prompts, or rejected: it has no answer
            self._requests.launched(request, now)
            chunks.append(Chunk(req, request, tokens, now, is_last))
        return chunks

    def _resume(self, reqs: Any, now: int) -> None:
        for req in reqs:
            request = self._requests.requests.get(self._rid(req))
            if request in self._requests.preempted_requests and request is not None:
                self._requests.resume(request, now)

    def _release_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._checks_always = False
        self.tracker.finishing = self._finished is not None
        req = self._released(args, kwargs)
        if req is not None and self._finished is not None and (rid := self._rid(req)) in self.requests:
            self._released_ns[rid] = monotonic_ns()

    def _link(self, reqs: Any, size: int) -> None:
        """Link the steps to a batch of other requests than the last one's."""
        self._end_unreported()
        self.reqs, self.size = reqs, size
        known, rid = self._requests.requests, self._rid
        found = [known.get(rid(req)) for req in reqs or ()]
        self._served = [(req, request) for req, request in zip(reqs or (), found) if request is not None]
        keys = [request.key for request in found if request is not None]
        self.tracker.link(keys)

    def _end_unreported(self) -> None:
        """End requests of the latest batch that ended without the engine's release call."""
        if self._finished is None or self._checks_always:
            return
        # Another request may have the same id by now.
        served = [req for req, request in self._served if self.requests.get(request.rid) is request]
        self._end_requests([req for req in served if self._finish_reason(req)])

    # -- its result processed -------------------------------------------------------------------------------

    def _process_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        now = monotonic_ns()
        tracker = self.tracker
        if not tracker.in_flight:
            return None
        batch = self._processed_batch(args, kwargs)
        step = tracker.take(batch, self._result(args, kwargs))
        if step is None:
            return None
        step.words[step.block + layout.PROCESS_START] = now
        step.child = layout.CHILD_PROCESS_RESULT
        tracker.running = step
        step.batch = batch
        step.result = self._processing(args, kwargs)
        step.drafts, step.verified = None, self._result(args, kwargs) if self.drafts_each else None
        drafts = self._verifying(args, kwargs)
        for rid, drafted, accepted in drafts or ():
            self._requests.drafted(rid, drafted, accepted)
        if drafts:
            tracker.drafted(
                sum(each[1] for each in drafts), sum(each[2] for each in drafts), are_counted=True
            )
        if step.prefill:
            self._released_ns.clear()  # of requests that were preempted, with their memory released
            for chunk in step.prefill:
                if chunk.is_last is None:
                    chunk.is_last = not self._is_middle_chunk(chunk.req)
                if self._is_prefill_only(chunk.req):
                    chunk.is_last = False
            self._requests.processing(step.prefill)
        return step

    def _process_exit(self, step: Step | None, result: Any, error: BaseException | None) -> None:
        if step is None:
            return
        now, tracker, scheduler = monotonic_ns(), self.tracker, step.result
        totals = self._verified(step.verified)
        if totals is not None and totals[0]:
            tracker.drafted(*totals, are_counted=False)
        if step.prefill:
            released = [self._released_ns.get(chunk.request.rid, 0) for chunk in step.prefill]
            released_ns = min(filter(None, released), default=0)
            self._requests.processed("" if error is None else error_type(error), released_ns)
        if self._finished is not None and (tracker.finishing or step.prefill is not None):
            tracker.finishing = self._checks_always
            finished = self._finished(step.batch)
            if finished:
                self._end_requests(finished)
            self._released_ns.clear()
        known = len(self.requests)
        if known != self.known or step.prefill is not None or now - self.read_ns >= layout.READING_NS:
            self.known = known
            self._read_queues(scheduler)
        step.store_queues(self.waiting, self.running, self.usage)
        if error is not None:
            tracker.fail(step, 1 << layout.CHILD_PROCESS_RESULT, error_type(error))
        if self.measures:
            self.busy = scheduler
        tracker.end(step, now)
        if tracker.late and not self.requests:
            tracker.read_late()

    def _read_queues(self, scheduler: Any) -> None:
        self.read_ns = monotonic_ns()
        waiting, running = self._queues(scheduler)
        self.waiting, self.running = figure(waiting), figure(running)
        self.usage = usage_figure(self._kv_usage(scheduler))
        bridge_opentelemetry()  # OpenTelemetry may have been imported meanwhile

    def _end_requests(self, finished: Sequence[Any]) -> None:
        requests = self._requests
        for req in finished:
            request = requests.requests.get(self._rid(req))
            if request is not None:
                reason = self._finish_reason(req)
                problem = request.problem or (self._outcome(reason).problem if reason else "")
                now = self._released_ns.pop(request.rid, 0)
                requests.drafts(request.rid, self._drafts(req))
                requests.finished(request.rid, self._output_tokens(req), reason, problem, now)
