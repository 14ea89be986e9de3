"""Level 3: the drafts of speculation, beside the pass that verifies them."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing.lifecycle import Step, Trackers
from sgl_aspects.tracing.observers.forward import ForwardObserver
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record import native
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
        self._parts = {
            role: _Drafts(trackers, forward, child)
            for role, child in _CHILDREN.items()
            if role in trackers.engine.roles
        }

    def observations(self) -> list[Observation]:
        in_python = native.compiled is None
        return [
            Observation(
                role,
                part._enter if in_python else part.draft_enter,
                part._exit if in_python else part.draft_exit,
                3,
                native.WatchedCall,
            )
            for role, part in self._parts.items()
        ]


class _Drafts(native.DraftPath):
    """The calls of one role; the compiled path handles those within a step of this process."""

    def __init__(self, trackers: Trackers, forward: ForwardObserver, child: int) -> None:
        self.tracker, self.forward = trackers.steps, forward
        self.child, self.start, self.before = child, CHILD_STARTS[child], layout.CHILD_RUN_BATCH
        self._write = trackers.recorder.spans(CHILD_TYPES[child])

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracker = self.tracker
        if self.forward.is_beside or self.forward.step is not None:
            return None  # in another one
        self.forward.is_beside = True
        step = tracker.running or (tracker.in_flight[-1] if tracker.in_flight else None)
        if step is None or not step.id:
            return monotonic_ns()
        self.before, step.child, at = step.child, self.child, step.block + self.start
        step.words[at] = step.words[at] or monotonic_ns()
        return step

    def _exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return
        self.forward.is_beside = False
        if isinstance(token, Step):
            token.words[token.block + self.start + 1] = monotonic_ns()
            token.child = self.before
            if error is not None:
                self.tracker.fail(token, 1 << self.child, error_type(error))
        elif self.tracker.remote[0]:
            self.forward.worker.write(self._write, token, error)
