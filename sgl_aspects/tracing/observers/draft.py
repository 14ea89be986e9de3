"""Level 3: the drafts of speculation, beside the pass that verifies them."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing.lifecycle import Step, Trackers
from sgl_aspects.tracing.observers.forward import ForwardObserver
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.open_steps import OpenSteps
from sgl_aspects.tracing.record.steps import CHILD_STARTS, CHILD_TYPES
from sgl_aspects.tracing.records import error_type

#: Role → the step's child that it is.
_CHILDREN = {
    "draft": layout.CHILD_DRAFT,
    "draft_search": layout.CHILD_DRAFT,
    "draft_extend": layout.CHILD_DRAFT_EXTEND,
}


class DraftObserver:
    """Stores the times of ``draft`` and ``draft_extend`` in the step; of several calls, from the first on.

    The passes of a draft model in them are not the step's: ``forward`` is the pass that verifies. Where the
    step runs in another process they are spans of this one.
    """

    def __init__(self, trackers: Trackers, forward: ForwardObserver) -> None:
        self._roles, self._recorder, self._tracker = trackers.engine.roles, trackers.recorder, trackers.steps
        self._forward = forward
        #: Stands in for the step of a draft model's passes, which are not recorded.
        self._nowhere = Step(OpenSteps.in_memory(), layout.OPEN_STEPS_WORD)

    def observations(self) -> list[Observation]:
        return [
            Observation(role, *self._observe(child), 3)
            for role, child in _CHILDREN.items()
            if role in self._roles
        ]

    def _observe(self, child: int) -> tuple[Any, Any]:
        tracker, forward, nowhere = self._tracker, self._forward, self._nowhere
        start, write = CHILD_STARTS[child], self._recorder.spans(CHILD_TYPES[child])

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if forward.step is not None:
                return None  # in another one
            forward.step = nowhere
            step = tracker.running or (tracker.in_flight[-1] if tracker.in_flight else None)
            if step is None or not step.id:
                return monotonic_ns(), None, 0
            before, step.child = step.child, child
            at = step.block + start
            step.words[at] = step.words[at] or monotonic_ns()
            return 0, step, before

        def leave(token: Any, result: Any, error: BaseException | None) -> None:
            if token is None:
                return
            forward.step = None
            start_ns, step, before = token
            if step is not None:
                step.words[step.block + start + 1] = monotonic_ns()
                step.child = before
                if error is not None:
                    tracker.fail(step, 1 << child, error_type(error))
            elif tracker.remote[0]:
                forward.worker.write(write, start_ns, error)

        return enter, leave
