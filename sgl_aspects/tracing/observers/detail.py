"""Level 4: what the scheduler and the layers do within a step, call by call."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

from sgl_aspects.engines.base import CallReader
from sgl_aspects.engines.contract import ROLES, Observation
from sgl_aspects.tracing.context import Opened, leave
from sgl_aspects.tracing.lifecycle import StepTracker, Trackers
from sgl_aspects.tracing.records import AttributeValue, error_type
from sgl_aspects.tracing.schema import DETAILS, KV_BYTES, KV_TOKENS


class DetailObserver:
    """Spans below a step: of the prefix cache, the KV pool, attention, operators and the sampler.

    A replayed graph runs no Python: its layers leave no spans.
    """

    def __init__(self, trackers: Trackers) -> None:
        #: Step and span of those that are open, the innermost last: steps run in one thread.
        open_spans: list[tuple[int, int]] = []
        self._details = {role: _Detail(trackers, role, open_spans) for role in DETAILS}

    def observations(self) -> list[Observation]:
        return [Observation(role, detail.enter, detail.exit, 4) for role, detail in self._details.items()]


class _Detail:
    """The calls of one role. Its arguments are in the order of its span's attributes."""

    def __init__(self, trackers: Trackers, role: str, open_spans: list[tuple[int, int]]) -> None:
        self._recorder, self._open = trackers.recorder, open_spans
        self._tracker: StepTracker = trackers.steps
        self._type = DETAILS[role]
        self._write = trackers.recorder.spans(self._type)
        self._moves = KV_BYTES in self._type.attributes
        #: Whether a step may begin with it. What a model does outside of a step is a warm-up.
        self._precedes = KV_TOKENS in self._type.attributes
        self._readers = [trackers.engine.call_reader(role, argument) for argument in ROLES[role]]

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start_ns = monotonic_ns()
        step_id, parent_id = self._tracker.parent_of_detail()
        if not step_id:
            return start_ns, 0, 0, 0, None, args, kwargs
        # A function may move both ways: neither role is below the other.
        if self._open and self._open[-1][0] == step_id and not self._moves:
            parent_id = self._open[-1][1]
        span_id = self._recorder.new_id()
        self._open.append((step_id, span_id))
        opened: Opened = self._recorder.enter(self._type, span_id, step_id, parent_id, start_ns)
        return start_ns, span_id, step_id, parent_id, opened, args, kwargs

    def exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        start_ns, span_id, step_id, parent_id, opened, args, kwargs = token
        end_ns, problem = monotonic_ns(), error_type(error)
        if step_id:
            self._open.remove((step_id, span_id))
            leave(opened)
        values = [_read(read, args, kwargs, result) for read in self._readers]
        if self._moves and values[-1] == 0:
            return  # a function that moves both ways has moved the other way, or nothing
        if step_id:
            self._write(span_id, step_id, parent_id, start_ns, end_ns, values, problem)
        elif self._precedes:
            # A request may wait for what is loaded through many passes without a step.
            self._tracker.keep_detail(self._write, start_ns, end_ns, values, problem, self._moves)


def _read(read: CallReader, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> AttributeValue:
    """Return a value; None where a version of the engine lacks it, which must not cost the span."""
    try:
        value: AttributeValue = read(args, kwargs, result)
    except (AttributeError, LookupError, TypeError):
        return None
    return value
