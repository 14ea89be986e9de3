"""The free slots of a ring: handed out one by one, in any thread, without a lock."""

from __future__ import annotations

import operator
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

from sgl_aspects.tracing.ring import format as layout
from sgl_aspects.tracing.ring.file import RingFile

# Where records go that come too late: a slot before the ring is there, and after.
_NOWHERE = bytearray(layout.SLOTS_OFFSET + layout.SLOT_BYTES)


class Slots:
    """``take()`` gives the number of a slot that is the caller's to fill; ``StopIteration``: none is free.

    Taking is one step of a range iterator, which no other thread can interrupt. ``memory`` and ``mask`` say
    where slot *n* is: at ``SLOTS_OFFSET + ((n & mask) << SLOT_SHIFT)``.
    """

    __slots__ = ("_find_file", "_limit", "_lock", "_numbers", "_words", "mask", "memory", "take")

    def __init__(self, find_file: Callable[[], RingFile | None]) -> None:
        self._find_file = find_file
        self.forget()

    def forget(self) -> None:
        """At the beginning, and in a forked child, where the ring is the parent's."""
        self._lock = threading.RLock()  # a signal's handler may record, too
        self.memory: Any = _NOWHERE
        self.mask = 0
        self.end()

    def end(self) -> None:
        """No more slots are handed out; a record that is just being written goes where it was to go."""
        self._limit = 0
        self._hand_out(0)

    def make_room(self) -> bool:
        """Whether slots are free again, because the collector has moved on. If not, counts a lost record."""
        file = self._find_file()
        if file is None:
            return False
        with self._lock:
            if operator.length_hint(self._numbers):
                return True  # another thread was faster
            if self.memory is not file.memory:
                self.memory, self.mask = file.memory, file.slots - 1
            limit = file.words[layout.WORD_TAKEN] + file.slots
            if limit > self._limit:
                self._hand_out(limit)
                return True
            file.words[layout.WORD_DROPPED] += 1
            return False

    def drop(self) -> None:
        """Counts a record that no number of slots would do for."""
        file = self._find_file()
        if file is not None:
            with self._lock:
                file.words[layout.WORD_DROPPED] += 1

    def fill(self, pack_into: Callable[..., None], *fields: Any) -> bool:
        """Packs a record into the next free slot, nothing where it does not fit; False where none is free."""
        try:
            number = self.take()
        except StopIteration:
            return self.make_room() and self.fill(pack_into, *fields)
        offset = layout.SLOTS_OFFSET + ((number & self.mask) << layout.SLOT_SHIFT)
        try:
            pack_into(self.memory, offset, *fields, number)
        except struct.error:
            self.void(number)
        return True

    def void(self, number: int) -> None:
        """Fills a slot whose record could not be packed: the reader shall not wait for it."""
        offset = layout.SLOTS_OFFSET + ((number & self.mask) << layout.SLOT_SHIFT)
        layout.BEGIN.pack_into(self.memory, offset, layout.KIND_VOID, 0, 0, 0, 0, number)

    def _hand_out(self, limit: int) -> None:
        self._numbers: Iterator[int] = iter(range(self._limit + 1, limit + 1))
        self.take = self._numbers.__next__
        self._limit = limit
