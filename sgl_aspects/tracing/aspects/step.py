"""Level 2: what the scheduler does, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from time import time_ns
from typing import Any

from sgl_aspects.engines.catalog import Catalog
from sgl_aspects.tracing.aspects.observer import Observation, error_type, nothing
from sgl_aspects.tracing.aspects.options import DEFAULTS, AspectOptions
from sgl_aspects.tracing.aspects.scheduled import SchedulerState
from sgl_aspects.tracing.context import restore
from sgl_aspects.tracing.recorder import Recorder, SpanWriter
from sgl_aspects.tracing.records import SpanBegin, SpanType

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


class StepSpans:
    """What records a step and its children, whose time alone is told."""

    def __init__(self, recorder: Recorder) -> None:
        self.step = recorder.spans(STEP)
        self.schedule = recorder.spans(SpanType("schedule"))
        self.run_batch = recorder.spans(SpanType("run_batch"))
        self.sample = recorder.spans(SpanType("sample"))
        self.process_result = recorder.spans(SpanType("process_result"))


class StepAspect:
    """Spans ``scheduler.step`` (a trace of its own, linked to the requests in its batch) and its children.

    A step that finds nothing to run leaves no span. While a step runs it is OpenTelemetry's current span, in
    a process that uses OpenTelemetry: spans of the user inside it are its children.
    """

    def __init__(
        self,
        recorder: Recorder,
        catalog: Catalog,
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
        roles, reader = catalog.roles, catalog.reader
        self._stepped = roles["step"].argument("scheduler")
        self._ran = roles["run_batch"].argument("batch")
        self._rid = reader("req.rid")
        self._reqs = reader("batch.reqs")
        self._batch_values = catalog.values_reader("batch", ("step_id", "mode", "batch_size", "num_tokens"))
        self._is_idle = reader("scheduler.is_idle")
        self._scheduler_values = catalog.values_reader("scheduler", ("waiting", "running", "kv_usage"))

    def observations(self) -> list[Observation]:
        return [
            Observation("receive_messages", self._idle_enter, nothing),
            Observation("step", self._step_enter, self._step_exit),
            Observation("schedule", _start, self._schedule_exit),
            Observation("run_batch", self._run_enter, self._run_exit),
            Observation("sample", _start, self._sample_exit),
            Observation("process_batch_result", _start, self._process_exit),
        ]

    def _step_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        step_id = state.step_id = state.begin_step()
        if not step_id and not (self._measures and self._recorder.level):
            return None
        self._batch, self._links = None, ()
        current = self._recorder.make_current(step_id) if step_id else None
        return time_ns(), self._stepped(args, kwargs), current

    def _step_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return
        start_ns, scheduler, current = token
        if current is not None:
            restore(current)
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

    def _schedule_exit(self, token: int, result: Any, error: BaseException | None) -> None:
        if error is not None or result is not None:
            # The step's own record has to come first, and whether there is a step is known only now.
            step_id = self._state.step_id
            if step_id:
                self._recorder.write(SpanBegin(STEP, step_id, step_id, 0, token))
            self._record(self._spans.schedule, token, error)

    def _run_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        state = self._state
        batch = self._batch = self._ran(args, kwargs)
        if not state.step_id:
            return 0
        reqs = self._reqs(batch)
        if reqs != self._linked_reqs:  # most decode steps serve whom the last one served
            requests, rid = state.requests, self._rid
            found = [requests.get(rid(req)) for req in reqs]
            self._step_links = [request.key for request in found if request is not None]
            self._linked_reqs = list(reqs)
        self._links = self._step_links
        state.run_id = self._recorder.new_id()
        return time_ns()

    def _run_exit(self, token: int, result: Any, error: BaseException | None) -> None:
        state = self._state
        step_id, run_id = state.step_id, state.run_id
        if step_id:
            state.run_id = 0
            problem = "" if error is None else error_type(error)
            self._spans.run_batch(run_id, step_id, step_id, token, time_ns(), (), problem)

    def _sample_exit(self, token: int, result: Any, error: BaseException | None) -> None:
        self._record(self._spans.sample, token, error, self._state.run_id)

    def _process_exit(self, token: int, result: Any, error: BaseException | None) -> None:
        self._record(self._spans.process_result, token, error)

    def _record(
        self, write: SpanWriter, start_ns: int, error: BaseException | None, parent_id: int = 0
    ) -> None:
        step_id = self._state.step_id
        if step_id:
            end_ns = time_ns()
            problem = "" if error is None else error_type(error)
            write(self._recorder.new_id(), step_id, parent_id or step_id, start_ns, end_ns, (), problem)


def _start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return time_ns()
