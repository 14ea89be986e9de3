"""The scheduler's side, for an engine whose loop is no function and may overlap.

The result of a batch is processed in a call of its own, possibly after the next batch was launched. So what
belongs to a batch is kept from its launch until its result comes, and a step is the life of a batch: from
its scheduling to the end of its processing. A turn of the loop that finds nothing to run leaves no trace.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass
from time import time_ns
from typing import Any, Generic, TypeVar

from sgl_aspects.engines.base import Engine
from sgl_aspects.tracing.aspects.observer import Observation, error_type, nothing
from sgl_aspects.tracing.aspects.options import DEFAULTS, AspectOptions
from sgl_aspects.tracing.aspects.scheduled import ScheduledRequest, SchedulerState
from sgl_aspects.tracing.aspects.step import PROCESS_RESULT, RUN_BATCH, SAMPLE, STEP, StepSpans
from sgl_aspects.tracing.recorder import Recorder, SpanWriter
from sgl_aspects.tracing.records import SpanType

_T = TypeVar("_T")


class _Launched(Generic[_T]):
    """What is kept of launched batches until their results are processed.

    It is found by the result object; the stages of a pipeline make another one of it, and keep the batch.
    """

    def __init__(self) -> None:
        self._waiting: collections.deque[tuple[Any, Any, _T]] = collections.deque(maxlen=64)

    def put(self, batch: Any, result: Any, item: _T) -> None:
        self._waiting.append((batch, result, item))

    def get(self, batch: Any, result: Any) -> _T | None:
        number = self._find(batch, result)
        return None if number is None else self._waiting[number][2]

    def take(self, batch: Any, result: Any) -> _T | None:
        number = self._find(batch, result)
        if number is None:
            return None
        item = self._waiting[number][2]
        del self._waiting[number]
        return item

    def _find(self, batch: Any, result: Any) -> int | None:
        by_batch = None
        for number, (its_batch, its_result, _) in enumerate(self._waiting):
            if its_result is result:
                return number
            if by_batch is None and its_batch is batch:
                by_batch = number
        return by_batch


@dataclass(eq=False)
class _Chunk:
    """A part of one request's prompt in a batch. ``is_last`` is settled when the result comes."""

    req: Any
    request: ScheduledRequest
    tokens: int
    is_last: bool = False


@dataclass(eq=False)
class _Prefill:
    """A batch that works on prompts."""

    batch: Any
    start_ns: int
    chunks: list[_Chunk]


class OverlappedRequestAspect:
    """Level 1: spans ``queue``, ``prefill`` (one for each chunk) and ``decode``."""

    def __init__(self, recorder: Recorder, engine: Engine, state: SchedulerState) -> None:
        self._recorder = recorder
        self._state = state
        self._launched: _Launched[_Prefill] = _Launched()
        self._processed: _Prefill | None = None
        call, reader = engine.call_reader, engine.reader
        self._added = call("add_request", "message")
        self._adding = call("add_request", "scheduler")
        self._is_follower = reader("scheduler.is_follower")
        self._scheduler = call("abort_scheduled_request", "scheduler")
        self._aborted = call("abort_scheduled_request", "message")
        self._ran = call("run_batch", "batch")
        self._processed_batch = call("process_batch_result", "batch")
        self._result = call("process_batch_result", "result")
        self._streamed = call("stream_output", "reqs")
        self._refused = call("reject_request", "req")
        self._retracted = call("retract", "req")
        self._message_rid = reader("message.rid")
        self._is_probe = reader("message.is_probe")
        self._abort_all = reader("message.abort_all")
        self._waiting_rids = reader("scheduler.waiting_rids")
        self._rid = reader("req.rid")
        self._finish_reason = reader("req.finish_reason")
        self._finished = reader("reqs.finished")
        self._output_tokens = reader("req.output_tokens")
        self._is_middle_chunk = reader("req.is_middle_chunk")
        self._is_prefill_only = reader("req.is_prefill_only")
        self._mode = reader("batch.mode")
        self._prefills = reader("batch.prefills")

    def observations(self) -> list[Observation]:
        return [
            Observation("add_request", self._add_enter, self._add_exit),
            Observation("add_embedding_request", self._add_enter, self._add_exit),
            Observation("abort_scheduled_request", self._abort_enter, self._abort_exit),
            Observation("reject_request", self._reject_enter, nothing),
            Observation("retract", self._retract_enter, nothing),
            Observation("run_batch", self._run_enter, self._run_exit),
            Observation("process_batch_result", self._process_enter, self._process_exit),
            Observation("stream_output", self._stream_enter, nothing),
        ]

    def _add_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        message = self._added(args, kwargs)
        if self._is_probe(message) or not self._recorder.level:
            return None
        rid = self._message_rid(message)
        if self._is_follower(self._adding(args, kwargs)):
            self._state.follow()
        self._state.add(rid)
        return rid

    def _add_exit(self, rid: Any, result: Any, error: BaseException | None) -> None:
        if error is not None and rid is not None:
            self._state.end(rid, None, None, error_type(error), time_ns())

    def _abort_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._scheduler(args, kwargs), self._aborted(args, kwargs)

    def _abort_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        """A request that waits is thrown out here; one that runs ends with its next step."""
        scheduler, message = token
        prefix, everything = self._message_rid(message), self._abort_all(message)
        waiting = self._waiting_rids(scheduler) or set()
        for rid, request in list(self._state.requests.items()):
            concerned = everything or (prefix and rid.startswith(prefix))
            if concerned and not request.is_running and rid not in waiting:
                self._state.end(rid, None, "abort", "", time_ns())

    def _reject_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        request = self._state.requests.get(self._rid(self._refused(args, kwargs)))
        if request is not None:
            request.problem = "rejected"

    def _retract_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        req = self._retracted(args, kwargs)
        self._state.retract(self._rid(req), self._output_tokens(req))

    def _run_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = self._ran(args, kwargs)
        if self._mode(batch) == "decode":
            return None  # nearly every step: nothing begins in it
        now = time_ns()
        chunks = []
        for req, tokens in self._prefills(batch) or ():
            request = self._state.requests.get(self._rid(req))
            if request is None or request.decode_id:
                continue  # not ours, or decoded along with other requests' prompts
            self._state.leave_queue(request, now)
            chunks.append(_Chunk(req, request, tokens))
        return _Prefill(batch, now, chunks) if chunks else None

    def _run_exit(self, prefill: _Prefill | None, result: Any, error: BaseException | None) -> None:
        if prefill is None:
            return
        if error is None:
            self._launched.put(prefill.batch, result, prefill)
        else:
            self._record(prefill, error_type(error))

    def _process_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch, result = self._processed_batch(args, kwargs), self._result(args, kwargs)
        prefill = self._processed = self._launched.take(batch, result)
        if prefill is not None:
            for chunk in prefill.chunks:
                chunk.is_last = not self._is_middle_chunk(chunk.req)

    def _process_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        prefill, self._processed = self._processed, None
        if prefill is not None:
            self._record(prefill, error_type(error))

    def _stream_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # On entry: before others are told, so that the request's own span ends after these.
        prefill, self._processed = self._processed, None
        if prefill is not None:
            self._record(prefill, "")  # the results are here, and leave the scheduler now
        requests = self._state.requests
        # Asked with each step: most have none that has finished.
        for req in self._finished(self._streamed(args, kwargs)) or ():
            reason, rid = self._finish_reason(req), self._rid(req)
            if rid in requests:
                problem = requests[rid].problem or (reason if reason == "abort" else "")
                self._state.end(rid, self._output_tokens(req), reason, problem, time_ns())

    def _record(self, prefill: _Prefill, problem: str) -> None:
        end_ns = time_ns()
        for chunk in prefill.chunks:
            is_last = chunk.is_last and not self._is_prefill_only(chunk.req)
            self._state.prefilled(chunk.request, chunk.tokens, is_last, prefill.start_ns, end_ns, problem)


@dataclass(eq=False)
class _Step:
    """A batch from its scheduling to its result. ``id`` 0: not traced, but figures for the metrics."""

    id: int
    start_ns: int
    values: Sequence[Any] = ()
    links: Sequence[int] = ()
    batch: Any = None


class OverlappedStepAspect:
    """Level 2: spans ``scheduler.step``, a trace of its own for each batch, and its children."""

    def __init__(
        self,
        recorder: Recorder,
        engine: Engine,
        state: SchedulerState,
        options: AspectOptions = DEFAULTS,
    ) -> None:
        self._recorder = recorder
        self._measures = options.measures
        self._busy: Any = None  # the scheduler, while the latest figures for the metrics show it at work
        self._state = state
        self._spans = StepSpans(recorder)
        self._scheduled: _Step | None = None
        self._linked_reqs: list[Any] = []
        self._links: list[int] = []
        self._is_decided = False  # whether the step to come is recorded
        self._launched: _Launched[_Step] = _Launched()
        call, reader = engine.call_reader, engine.reader
        self._ran = call("run_batch", "batch")
        self._to_sample = call("launch_sample", "result")
        self._processing = call("process_batch_result", "scheduler")
        self._processed_batch = call("process_batch_result", "batch")
        self._result = call("process_batch_result", "result")
        self._batch_of = reader("schedule.batch")
        self._rid = reader("req.rid")
        self._reqs = reader("batch.reqs")
        self._step_number = reader("batch.step_id")
        self._batch_values = engine.values_reader("batch", ("mode", "batch_size", "num_tokens"))
        self._scheduler_values = engine.values_reader("scheduler", ("waiting", "running", "kv_usage"))

    def observations(self) -> list[Observation]:
        return [
            Observation("schedule", _start, self._schedule_exit),
            Observation("run_batch", self._run_enter, self._run_exit),
            Observation("sample", self._sample_enter, self._sample_exit),
            Observation("launch_sample", self._launch_sample_enter, self._launch_sample_exit),
            Observation("process_batch_result", self._process_enter, self._process_exit),
        ]

    def _schedule_exit(self, start_ns: int, result: Any, error: BaseException | None) -> None:
        details = self._state.details
        if not self._batch_of(result):
            if self._busy is not None:
                self._idle()
            if details:
                details.clear()
            return  # nothing to run: thousands of times a second
        step = self._scheduled = self._begin(start_ns)
        self._is_decided = True
        if step is not None and step.id:
            schedule_id = self._child(self._spans.schedule, step.id, step.id, start_ns)
            for write, began_ns, end_ns, problem in details:
                parent_id = schedule_id if began_ns >= start_ns else step.id
                write(self._recorder.new_id(), step.id, parent_id, began_ns, end_ns, (), problem)
        details.clear()

    def _begin(self, start_ns: int) -> _Step | None:
        """A new step; None where it is not to be recorded."""
        step_id = self._state.begin_step()
        if not step_id:
            return _Step(0, start_ns) if self._measures and self._recorder.level else None
        step = _Step(step_id, start_ns)
        # The step's own record has to come first: its children name it.
        self._recorder.announce(STEP, step.id, step.id, 0, start_ns)
        return step

    def _run_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        now = time_ns()
        is_decided, self._is_decided = self._is_decided, False
        step, self._scheduled = (self._scheduled if is_decided else self._begin(now)), None
        if step is None:
            return None
        step.batch = batch = self._ran(args, kwargs)
        # Now: a batch that decodes goes on into the next step, changed.
        step.values = self._batch_values(batch)
        if not step.id:
            return now, step, None
        reqs = self._reqs(batch) or ()
        if reqs != self._linked_reqs:  # most decode steps serve whom the last one served
            requests, rid = self._state.requests, self._rid
            found = [requests.get(rid(req)) for req in reqs]
            self._links = [request.key for request in found if request is not None]
            self._linked_reqs = list(reqs)
        step.links = self._links
        run_id = self._recorder.new_id()
        self._state.step_id, self._state.run_id = step.id, run_id
        # Where the process is killed in it, what was below it has a parent.
        self._recorder.announce(RUN_BATCH, run_id, step.id, step.id, now)
        return now, step, self._recorder.begin(RUN_BATCH, run_id, step.id, step.id, now)

    def _run_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return
        start_ns, step, opened = token
        if opened is None:
            batch, step.values, step.batch = step.batch, [None, *step.values], None
            if error is None:
                self._launched.put(batch, result, step)
            return
        run_id, self._state.run_id, self._state.step_id = self._state.run_id, 0, 0
        problem = error_type(error)
        self._spans.run_batch(run_id, step.id, step.id, start_ns, time_ns(), (), problem, (), opened)
        step.values = [self._step_number(step.batch), *step.values]
        batch, step.batch = step.batch, None
        if error is None:
            self._launched.put(batch, result, step)
        else:
            self._end(step, (None, None, None), problem)

    def _sample_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step_id = self._state.step_id
        return self._open_child(SAMPLE, step_id, self._state.run_id or step_id) if step_id else None

    def _sample_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is not None:
            self._close_child(self._spans.sample, token, error_type(error))

    def _launch_sample_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = self._to_sample(args, kwargs)
        step = self._launched.get(None, result) if result is not None else None
        self._state.step_id = step.id if step is not None else 0
        return result, step

    def _launch_sample_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        self._state.step_id = 0
        launched, step = token
        if error is not None and step is not None and step.id:  # there will be no result to process
            self._launched.take(None, launched)
            self._end(step, (None, None, None), error_type(error))

    def _process_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = self._launched.take(self._processed_batch(args, kwargs), self._result(args, kwargs))
        self._state.step_id = step.id if step is not None else 0
        if step is None:
            return None
        child = self._open_child(PROCESS_RESULT, step.id, step.id) if step.id else None
        return self._processing(args, kwargs), step, child

    def _process_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        self._state.step_id = 0
        if token is None:
            return
        scheduler, step, child = token
        problem = error_type(error)
        if child is not None:
            self._close_child(self._spans.process_result, child, problem)
        self._busy = scheduler if self._measures else None
        self._end(step, self._scheduler_values(scheduler), problem)

    def _end(self, step: _Step, scheduler_values: Sequence[Any], problem: str) -> None:
        values = [*step.values, *scheduler_values]
        self._spans.step(step.id, step.id, 0, step.start_ns, time_ns(), values, problem, step.links)

    def _idle(self) -> None:
        """After the last step the metrics are to show a scheduler without work."""
        scheduler, self._busy = self._busy, None
        waiting, _, kv_usage = self._scheduler_values(scheduler)
        now = time_ns()
        self._spans.step(0, 0, 0, now, now, [None, None, 0, None, waiting, 0, kv_usage])

    def _open_child(self, type: SpanType, step_id: int, parent_id: int) -> Any:
        span_id, start_ns = self._recorder.new_id(), time_ns()
        opened = self._recorder.begin(type, span_id, step_id, parent_id, start_ns)
        return opened, span_id, step_id, parent_id, start_ns

    def _close_child(self, write: SpanWriter, child: Any, problem: str) -> None:
        opened, span_id, step_id, parent_id, start_ns = child
        write(span_id, step_id, parent_id, start_ns, time_ns(), (), problem, (), opened)

    def _child(
        self, write: SpanWriter, step_id: int, parent_id: int, start_ns: int, problem: str = ""
    ) -> int:
        span_id = self._recorder.new_id()
        write(span_id, step_id, parent_id, start_ns, time_ns(), (), problem)
        return span_id


def _start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return time_ns()
