"""Level 2: what the scheduler does, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from time import time_ns
from typing import Any

from sgl_aspects.engines.base import Engine
from sgl_aspects.tracing.aspects.observer import Observation, error_type, nothing
from sgl_aspects.tracing.aspects.options import DEFAULTS, AspectOptions
from sgl_aspects.tracing.aspects.scheduled import SchedulerState
from sgl_aspects.tracing.context import close_span
from sgl_aspects.tracing.recorder import Recorder, SpanWriter
from sgl_aspects.tracing.records import SpanType

STEP = SpanType(
    "scheduler.step",
    {
        "sgl_aspects.step.id": int,
        "sgl_aspects.forward.mode": str,
        "sgl_aspects.batch.size": int,
        "sgl_aspects.batch.tokens": int,
        "sgl_aspects.queue.waiting": int,
        "sgl_aspects.queue.running": int,
        "sgl_aspects.kv.usage": float,
    },
)

SCHEDULE = SpanType("schedule")
RUN_BATCH = SpanType("run_batch")
SAMPLE = SpanType("sample")
PROCESS_RESULT = SpanType("process_result")


class StepSpans:
    """What records a step and its children, whose time alone is told."""

    def __init__(self, recorder: Recorder) -> None:
        self.step = recorder.spans(STEP)
        self.schedule = recorder.spans(SCHEDULE)
        self.run_batch = recorder.spans(RUN_BATCH)
        self.sample = recorder.spans(SAMPLE)
        self.process_result = recorder.spans(PROCESS_RESULT)


class StepAspect:
    """Spans ``scheduler.step`` (a trace of its own, linked to the requests in its batch) and its children.

    A step that finds nothing to run leaves no span. Each span is the current one while it runs: spans of the
    user inside it are its children.
    """

    def __init__(
        self,
        recorder: Recorder,
        engine: Engine,
        state: SchedulerState,
        options: AspectOptions = DEFAULTS,
    ) -> None:
        self._recorder = recorder
        self._measures = options.measures
        self._is_busy = False  # the latest figures for the metrics are of a scheduler with work
        self._state = state
        self._spans = StepSpans(recorder)
        self._batch: Any = None
        self._links: Sequence[int] = ()
        self._linked_reqs: list[Any] = []
        self._step_links: list[int] = []
        call, reader = engine.call_reader, engine.reader
        self._stepped = call("step", "scheduler")
        self._ran = call("run_batch", "batch")
        self._rid = reader("req.rid")
        self._reqs = reader("batch.reqs")
        self._batch_values = engine.values_reader("batch", ("step_id", "mode", "batch_size", "num_tokens"))
        self._is_idle = reader("scheduler.is_idle")
        self._scheduler_values = engine.values_reader("scheduler", ("waiting", "running", "kv_usage"))

    def observations(self) -> list[Observation]:
        return [
            Observation("receive_messages", self._idle_enter, nothing),
            Observation("step", self._step_enter, self._step_exit),
            Observation("schedule", self._schedule_enter, self._schedule_exit),
            Observation("run_batch", self._run_enter, self._run_exit),
            Observation("sample", self._sample_enter, self._sample_exit),
            Observation("process_batch_result", self._process_enter, self._process_exit),
        ]

    def _step_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        step_id = state.step_id = state.begin_step()
        if not step_id and not (self._measures and self._recorder.level):
            return None
        self._batch, self._links = None, ()
        start_ns = time_ns()
        opened = self._recorder.begin(STEP, step_id, step_id, 0, start_ns) if step_id else None
        return start_ns, self._stepped(args, kwargs), opened

    def _step_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return
        start_ns, scheduler, opened = token
        if opened is not None:
            close_span(opened)
        step_id, self._state.step_id = self._state.step_id, 0
        batch, self._batch = self._batch, None
        if batch is None and error is None:
            return
        end_ns = time_ns()
        values = [*self._batch_values(batch), *self._scheduler_values(scheduler)]
        problem = "" if error is None else error_type(error)
        # Without an id (a step that is not traced) it is but figures for the metrics.
        self._spans.step(step_id, step_id, 0, start_ns, end_ns, values, problem, self._links)
        self._is_busy = self._measures

    def _idle_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """It looks for messages; after its last step the metrics are to show that it has no work."""
        if self._is_busy:
            scheduler = args[0]
            if self._is_idle(scheduler):
                self._is_busy = False
                values = [None, None, 0, None, *self._scheduler_values(scheduler)]
                now = time_ns()
                self._spans.step(0, 0, 0, now, now, values)

    def _schedule_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._begin(SCHEDULE, self._state.step_id)

    def _schedule_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return
        if error is None and result is None:
            close_span(token[2])
            return
        # The step's own record has to come first, and whether there is a step is known only now.
        step_id = self._state.step_id
        self._recorder.announce(STEP, step_id, step_id, 0, token[1])
        self._end(self._spans.schedule, token, step_id, error)

    def _run_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        batch = self._batch = self._ran(args, kwargs)
        if not state.step_id:
            return None
        reqs = self._reqs(batch)
        if reqs != self._linked_reqs:  # most decode steps serve whom the last one served
            requests, rid = state.requests, self._rid
            found = [requests.get(rid(req)) for req in reqs]
            self._step_links = [request.key for request in found if request is not None]
            self._linked_reqs = list(reqs)
        self._links = self._step_links
        token = self._begin(RUN_BATCH, state.step_id)
        state.run_id, start_ns, _ = token
        # Where the process is killed in it, what was below it has a parent.
        self._recorder.announce(RUN_BATCH, state.run_id, state.step_id, state.step_id, start_ns)
        return token

    def _run_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is not None:
            self._state.run_id = 0
            self._end(self._spans.run_batch, token, self._state.step_id, error)

    def _sample_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._begin(SAMPLE, self._state.run_id or self._state.step_id)

    def _sample_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        self._end(self._spans.sample, token, self._state.run_id or self._state.step_id, error)

    def _process_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._begin(PROCESS_RESULT, self._state.step_id)

    def _process_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        self._end(self._spans.process_result, token, self._state.step_id, error)

    def _begin(self, type: SpanType, parent_id: int) -> Any:
        """A child of the step begins, and is current; None where the step is not recorded."""
        step_id = self._state.step_id
        if not step_id:
            return None
        span_id, start_ns = self._recorder.new_id(), time_ns()
        return span_id, start_ns, self._recorder.begin(type, span_id, step_id, parent_id, start_ns)

    def _end(self, write: SpanWriter, token: Any, parent_id: int, error: BaseException | None) -> None:
        if token is not None:
            span_id, start_ns, opened = token
            problem = "" if error is None else error_type(error)
            write(span_id, self._state.step_id, parent_id, start_ns, time_ns(), (), problem, (), opened)
