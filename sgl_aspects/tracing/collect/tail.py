"""Tail sampling: a request that head sampling left out is exported nonetheless if it failed or was slow.

Its spans are held until it ends. Beyond a number of such requests the oldest is given up.
"""

from __future__ import annotations

import collections
from typing import Generic, NamedTuple, TypeVar

from sgl_aspects.tracing.records import RequestBegin, SpanEnd

_T = TypeVar("_T")

# Spans held at once; a span is about a kilobyte.
_HELD_SPANS = 20_000


class TailChoice(NamedTuple):
    """``slower_than`` in seconds; None: no limit. A caller's own decision stands (``parent_based``)."""

    failed: bool = True
    slower_than: float | None = None
    parent_based: bool = True

    def concerns(self, begin: RequestBegin) -> bool:
        """Return whether the request may still be kept: sampling left it out, not its caller."""
        if begin.sampled or (self.parent_based and begin.parent_id):
            return False
        return self.failed or self.slower_than is not None

    def keeps(self, end: SpanEnd) -> bool:
        if self.failed and end.error:
            return True
        return self.slower_than is not None and end.end_ns - end.start_ns >= self.slower_than * 1e9


class HeldSpans(Generic[_T]):
    """Spans held until their request ends, by the request's span id."""

    def __init__(self) -> None:
        self._held: collections.OrderedDict[int, list[_T]] = collections.OrderedDict()
        self._count = 0

    def __contains__(self, request: int) -> bool:
        return request in self._held

    def begin(self, request: int) -> None:
        self._held[request] = []

    def hold(self, request: int, span: _T) -> int:
        """Hold the span; return how many spans were given up to make room."""
        self._held[request].append(span)
        self._count += 1
        given_up = 0
        while self._count > _HELD_SPANS and len(self._held) > 1:
            given_up += len(self.end(next(iter(self._held))))
        return given_up

    def end(self, request: int) -> list[_T]:
        """Remove and return all spans held for the request."""
        held = self._held.pop(request, [])
        self._count -= len(held)
        return held
