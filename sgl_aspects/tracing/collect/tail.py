"""Tail sampling: a request that head sampling left out is exported nonetheless if it failed or was slow.

Its spans are held until it ends.
"""

from __future__ import annotations

from typing import NamedTuple

from sgl_aspects.tracing.records import RequestBegin, SpanEnd


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
