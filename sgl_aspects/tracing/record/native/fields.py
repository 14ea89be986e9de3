"""Python classes in the place of the compiled module's types, used if it is absent."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sgl_aspects.tracing.record import format as layout


class Fields:
    """Attributes of any name; the compiled types have those that their C functions use."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


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
