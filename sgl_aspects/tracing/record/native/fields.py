"""Python classes in the place of the compiled module's types, used if it is absent."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sgl_aspects.tracing.record import format as layout


class Fields:
    """Attributes of any name; the compiled types have those that their C functions use."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class DraftCounts:
    """The drafts of a request."""

    def __init__(self) -> None:
        self.drafted, self._exactly = 0, Counter[int]()

    def count(self, drafted: int, accepted: int) -> None:
        """Count a draft of so many tokens, and how many were accepted."""
        self.drafted += drafted
        self._exactly[accepted] += 1

    def exactly(self) -> list[int]:
        """Return how many drafts had 0, 1, ... accepted tokens."""
        return [self._exactly[number] for number in range(max(self._exactly, default=-1) + 1)]


class Blocks(Fields):
    """The memory in which steps are open."""

    def map(self, memory: Any) -> None:
        """Note that steps are open in this memory."""

    def retire(self) -> None:
        """Release the memory."""


class Slots:
    """The free slots: ``take()`` returns the next number, its memory, and the offset there.

    Taking is one step of iterators written in C, which other threads cannot interrupt. ``StopIteration``:
    none is free.
    """

    def __init__(self) -> None:
        self.hand_out(1, 0, b"", 0)

    def hand_out(self, first: int, last: int, memory: Any, offset: int) -> None:
        """Set the free numbers and the offset of the first."""
        numbers = range(first, last + 1)
        offsets = range(offset, offset + len(numbers) * layout.SLOT_BYTES, layout.SLOT_BYTES)
        self._numbers: Iterator[int] = iter(numbers)
        self.take: Callable[[], tuple[int, Any, int]] = zip(
            self._numbers, itertools.repeat(memory), offsets
        ).__next__

    def __length_hint__(self) -> int:
        return operator.length_hint(self._numbers)
