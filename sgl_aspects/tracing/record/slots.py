"""The free slots of a ring: handed out one by one, in any thread, without a lock."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any

from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.record.file import RingFile


class Slots(native.Slots):
    """``take()`` returns a slot for the caller to fill: its number, its memory, and its offset there.

    ``StopIteration``: none is free, see ``make_room``. Taking is one step in C, which other threads cannot
    interrupt.
    """

    def __init__(self, find_file: Callable[[], RingFile | None], when_full: Callable[[], None]) -> None:
        super().__init__()
        self._find_file = find_file
        self._when_full = when_full
        self.forget()

    def forget(self) -> None:
        """Reset: at the start, and in a forked child, where the ring is the parent's."""
        self._lock = threading.RLock()  # a signal handler may record, too
        self.end()

    def end(self) -> None:
        """Stop handing out slots; a record that is just being written still goes to its slot."""
        self._last = 0
        self._hand_out(0, b"", 0)

    def close(self) -> None:
        """End, and release the ring."""
        self.end()
        self._find_file = self._when_full = _nothing

    def make_room(self) -> bool:
        """Return whether slots are free again, because the collector has moved on; if not, count a lost
        record.
        """
        file = self._find_file()
        if file is None:
            return False
        with self._lock:
            if operator.length_hint(self):
                return True  # another thread was faster
            free = file.words[layout.WORD_TAKEN] + file.slots
            if free > self._last:
                place = (self._last + 1) % file.slots
                # Up to the file's last slot: offsets are contiguous until there.
                last = self._last + min(free - self._last, file.slots - place)
                self._hand_out(last, file.memory, layout.SLOTS_OFFSET + place * layout.SLOT_BYTES)
                return True
            file.words[layout.WORD_DROPPED] += 1
        self._when_full()
        return False

    def drop(self) -> None:
        """Count a record that no number of slots could hold."""
        file = self._find_file()
        if file is not None:
            with self._lock:
                file.words[layout.WORD_DROPPED] += 1

    def _hand_out(self, last: int, memory: Any, offset: int) -> None:
        self.hand_out(self._last + 1, last, memory, offset)
        self._last = last


def _nothing() -> None:
    """The file and the report of a ring that is closed."""
