"""Level 4: what the scheduler and the layers do within a step, call by call."""

from __future__ import annotations

from time import time_ns
from typing import Any

from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing.context import Opened, leave
from sgl_aspects.tracing.lifecycle import StepTracker, Trackers
from sgl_aspects.tracing.records import SpanType, error_type
from sgl_aspects.tracing.schema import DETAILS


class DetailObserver:
    """Spans below a step: of the prefix cache, the KV pool, attention, operators and the sampler.

    A replayed graph runs no Python: its layers leave no spans.
    """

    def __init__(self, trackers: Trackers) -> None:
        self._details = {
            role: _Detail(trackers, type) for role, type in DETAILS.items() if role in trackers.engine.roles
        }

    def observations(self) -> list[Observation]:
        return [Observation(role, detail.enter, detail.exit, 4) for role, detail in self._details.items()]


class _Detail:
    def __init__(self, trackers: Trackers, type: SpanType) -> None:
        self._recorder = trackers.recorder
        self._tracker: StepTracker = trackers.steps
        self._type = type
        self._write = trackers.recorder.spans(type)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start_ns = time_ns()
        step_id, parent_id = self._tracker.parent_of_detail()
        if not step_id:
            return start_ns, 0, 0, 0, None
        span_id = self._recorder.new_id()
        opened: Opened = self._recorder.enter(self._type, span_id, step_id, parent_id, start_ns)
        return start_ns, span_id, step_id, parent_id, opened

    def exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        start_ns, span_id, step_id, parent_id, opened = token
        end_ns, problem = time_ns(), error_type(error)
        if step_id:
            leave(opened)
            self._write(span_id, step_id, parent_id, start_ns, end_ns, (), problem)
        else:
            self._tracker.keep_detail(self._write, start_ns, end_ns, problem)
