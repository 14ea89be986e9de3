"""Level 3: the drafts of speculation, beside the pass that verifies them."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing.lifecycle import Step, Trackers
from sgl_aspects.tracing.observers.forward import ForwardObserver
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.open_steps import OpenSteps
from sgl_aspects.tracing.record.recorder import SpanWriter
from sgl_aspects.tracing.records import error_type
from sgl_aspects.tracing.schema import DRAFTS


class DraftObserver:
    """Writes ``draft`` and ``draft_extend`` below ``run_batch``.

    The passes of a draft model in them are not the step's: ``forward`` is the pass that verifies.
    """

    def __init__(self, trackers: Trackers, forward: ForwardObserver) -> None:
        self._engine, self._recorder, self._tracker = trackers.engine, trackers.recorder, trackers.steps
        self._forward = forward
        #: Stands in for the step of a draft model's passes, which are not recorded.
        self._nowhere = Step(OpenSteps.in_memory(), layout.OPEN_STEPS_WORD)

    def observations(self) -> list[Observation]:
        return [
            Observation(role, self._enter, self._exit(self._recorder.spans(type)), 3)
            for role, type in DRAFTS.items()
            if role in self._engine.roles
        ]

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracker, forward = self._tracker, self._forward
        step = tracker.running or (tracker.in_flight[-1] if tracker.in_flight else None)
        step_id = step.id if step is not None else forward.worker.step_id
        is_outermost = forward.step is None
        if is_outermost:
            forward.step = self._nowhere
        return step_id, monotonic_ns(), is_outermost

    def _exit(self, write: SpanWriter) -> Any:
        def leave(token: Any, result: Any, error: BaseException | None) -> None:
            step_id, start_ns, is_outermost = token
            if is_outermost:
                self._forward.step = None
            if step_id and is_outermost:
                run_id = layout.child_id(step_id, layout.CHILD_RUN_BATCH)
                span_id = self._recorder.new_id()
                write(span_id, step_id, run_id, start_ns, monotonic_ns(), (), error_type(error))

        return leave
