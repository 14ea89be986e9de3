"""Durations of steps that may overlap: each counts for the time that it adds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable


class AddedTime:
    """Takes the steps of schedulers, each scheduler's in the order in which they end.

    An engine that overlaps launches a batch before the previous result has come. The sum of what its steps
    add is its busy time. A step reported after a later one counts whole.
    """

    def __init__(self) -> None:
        self._ends: defaultdict[Hashable, int] = defaultdict(int)

    def of(self, scheduler: Hashable, start_ns: int, end_ns: int) -> int:
        """Return the nanoseconds of this step that lie after the end of the previous ones."""
        last_ns = self._ends[scheduler]
        if end_ns > last_ns:
            self._ends[scheduler] = end_ns
            start_ns = max(start_ns, last_ns)
        return max(0, end_ns - start_ns)

    def forget(self, scheduler: Hashable) -> None:
        """Forget a writer whose process has ended."""
        self._ends.pop(scheduler, None)
