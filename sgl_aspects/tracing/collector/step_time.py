"""How long steps take where two may be open at once: each counts for the time that it adds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable


class AddedTime:
    """Fed with the steps of schedulers, each scheduler's in the order in which they end.

    An engine that overlaps launches a batch before the result of the one before has come. The sum of what
    its steps add is the time in which it was busy. A step that is told after a later one counts whole.
    """

    def __init__(self) -> None:
        self._ends: defaultdict[Hashable, int] = defaultdict(int)

    def of(self, scheduler: Hashable, start_ns: int, end_ns: int) -> int:
        """The nanoseconds of this step that lie after the end of those before it."""
        last_ns = self._ends[scheduler]
        if end_ns > last_ns:
            self._ends[scheduler] = end_ns
            start_ns = max(start_ns, last_ns)
        return max(0, end_ns - start_ns)

    def forget(self, scheduler: Hashable) -> None:
        """Its process has ended."""
        self._ends.pop(scheduler, None)
