"""The reader of a ring file: for the collector, and for tools that inspect a live or dead process.

Nothing in a file is trusted: a process may have died at any point of its writing, and a file may be damaged.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from sgl_aspects.files import lock_holder, unfollowed
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.codec import DamagedError, Decoder
from sgl_aspects.tracing.records import ProcessDescribed, Record, SpanEnd

# Slots read at once, and slots read to check for new records, which is frequent.
_CHUNK = 512
_GLANCE = 16
# Slots read at once while it is being written: 16 MB, a whole ring by default.
_SNAPSHOT = 1 << 16
# Seconds after which a slot that a living process took and never filled (its thread was interrupted) is
# skipped.
_PATIENCE_SECONDS = 5.0
_WORDS = layout.HEADER_BYTES // 8


class RingReader:
    """One process's ring. ``taken`` is the number of the last record that was read.

    :raises DamagedError: it is no ring of this version.
    :raises PermissionError: it is another user's, or others may write it.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.name = path.name.removesuffix(layout.SUFFIX)
        self.last_ns = 0
        self.damaged = 0
        flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC
        self._descriptor = unfollowed(str(path), flags)
        self._stuck_since: float | None = None
        self.is_exhausted = False  # its process is gone and everything is read
        self.gets_requests = False  # it has begun one
        try:
            self._check()
        except (DamagedError, OSError):
            os.close(self._descriptor)
            raise
        self.taken = self._first_taken()
        self._delivered, self._committed = self.taken, (0, 0)
        #: The last record that is in exported metrics, and whether the latest that were read are among them.
        self.counted, self.is_counted = self.taken, False
        #: Records beyond it that ``history`` did not find any more.
        self.overwritten = 0
        #: Records that an earlier collector released before their spans were delivered.
        self.lost = max(0, self.taken - self._header()[layout.WORD_DELIVERED])

    def _check(self) -> None:
        status = os.fstat(self._descriptor)
        size = status.st_size
        if status.st_uid != os.geteuid():  # also for root: what another user wrote is not decoded
            raise PermissionError(
                errno.EPERM, f"it is user {status.st_uid}'s: read it as that user", str(self.path)
            )
        if status.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "others may write it", str(self.path))
        if size < layout.SLOTS_OFFSET:
            raise DamagedError(f"{self.path} is too short for a ring")
        words = self._header()
        self.slots = words[layout.WORD_SLOTS]
        if (
            words[layout.WORD_MAGIC] != int.from_bytes(layout.MAGIC, "little")
            or words[layout.WORD_VERSION] != layout.VERSION
            or words[layout.WORD_SLOT_BYTES] != layout.SLOT_BYTES
            or words[layout.WORD_SLOTS_OFFSET] != layout.SLOTS_OFFSET
            or words[layout.WORD_DEFINITIONS_OFFSET] != layout.HEADER_BYTES
            or not 0 < self.slots <= 1 << 24
            or self.slots & (self.slots - 1)
            or size < layout.SLOTS_OFFSET + self.slots * layout.SLOT_BYTES
        ):
            raise DamagedError(f"{self.path} is not a ring of version {layout.VERSION}")
        self.process_id = words[layout.WORD_PROCESS_ID]
        offset = words[layout.WORD_CLOCK_OFFSET_NS]
        self._clock_offset = offset - (offset >> 63 << 64)  # signed
        self.started_ns = words[layout.WORD_STARTED_NS] + self._clock_offset
        self._decoder = Decoder(self._read_definitions, self._clock_offset)

    def _first_taken(self) -> int:
        taken = self._header()[layout.WORD_TAKEN]
        newest = self._newest() if taken else 0
        # A number beyond the ring's is damage: then everything in the ring is read.
        return taken if taken <= newest else max(0, newest - self.slots)

    def _header(self) -> tuple[int, ...]:
        return struct.unpack(f"<{_WORDS}Q", self._read(0, layout.HEADER_BYTES))

    def _read(self, offset: int, size: int) -> bytes:
        data = os.pread(self._descriptor, size, offset)
        return data if len(data) == size else data.ljust(size, b"\0")

    @property
    def dropped(self) -> int:
        """Return the number of records dropped because the ring was full."""
        return self._header()[layout.WORD_DROPPED]

    @property
    def detaching_ns(self) -> int:
        """The time since which hooks are being removed from its process, which goes on untraced; 0: they are
        not.
        """
        began = self._header()[layout.WORD_DETACHING_NS]
        return began and began + self._clock_offset

    def now_ns(self) -> int:
        """Return Unix time now, as its process would record it."""
        return time.monotonic_ns() + self._clock_offset

    @property
    def was_detached(self) -> bool:
        """Return whether its process goes on untraced, so that its open spans have not failed."""
        return self._header()[layout.WORD_CLOSED] == layout.DETACHED

    def is_alive(self) -> bool:
        """Return whether a process still holds the file's lock."""
        return lock_holder(self._descriptor) is not None

    def poll(self, alive: bool = True) -> tuple[list[Record], bool]:
        """Read the records since the last call; returns them, and whether more may be available at once.

        ``alive``: the process may still finish a record that it has begun.
        """
        first = self.taken + 1
        count = self._adjacent(first, _CHUNK)
        offset = layout.SLOTS_OFFSET + (first & (self.slots - 1)) * layout.SLOT_BYTES
        glance = min(_GLANCE, count)
        whole = _whole(self._read(offset, glance * layout.SLOT_BYTES), first)
        if whole == glance:
            whole = _whole(self._read(offset, count * layout.SLOT_BYTES), first)
        if not whole:
            return [], self._pass_over(first, alive)
        # Read only now: the marks are set, so the records are complete.
        data = self._read(offset, whole * layout.SLOT_BYTES)
        self._stuck_since = None
        self.taken += whole
        self.is_counted = self.taken <= self.counted
        records = self._records(data, range(0, len(data), layout.SLOT_BYTES))
        # A dead process may have complete records after an unfinished one.
        return records, whole == count or not alive

    def is_behind(self) -> bool:
        """Return whether more than an eighth of the ring waits to be read."""
        number = self.taken + self.slots // 8
        end = layout.SLOTS_OFFSET + ((number & (self.slots - 1)) + 1) * layout.SLOT_BYTES
        return self._read(end - 8, 8) == number.to_bytes(8, "little")

    def descriptions(self) -> list[ProcessDescribed]:
        """Return what its process has said of itself so far."""
        return self._decoder.descriptions()

    def history(self) -> Iterator[Record]:
        """Read the process's description, and the records up to ``taken`` that are still in the ring, oldest
        first; ``taken`` stays.
        """
        yield from self.descriptions()
        number = max(1, self.taken - self.slots + 1)
        self.overwritten = max(0, number - 1 - self.counted)
        size = layout.SLOT_BYTES
        while number <= self.taken:
            first = number & (self.slots - 1)
            count = self._adjacent(number, min(_SNAPSHOT, self.taken - number + 1))
            self.is_counted = number <= self.counted
            # Twice, and quickly: the process may be overwriting it.
            data, again = (self._read(layout.SLOTS_OFFSET + first * size, count * size) for _ in range(2))
            positions = [
                index * size
                for index, mark in enumerate(_marks(data))
                if mark == number + index
                and data[index * size : index * size + size] == again[index * size : index * size + size]
            ]
            self.overwritten += 0 if self.is_counted else count - len(positions)
            damaged = self.damaged
            yield from self._records(data, positions)
            self.damaged = damaged
            number += count

    def _adjacent(self, first: int, most: int) -> int:
        """Return how many slots from ``first`` on may be read at once, all of them counted or none."""
        most = min(most, self.slots - (first & (self.slots - 1)))
        return min(most, self.counted - first + 1) if first <= self.counted else most

    def open_steps(self) -> Iterator[SpanEnd]:
        """Read the spans of the steps that are open now; of a dead process, those that it never ended."""
        data = self._read(0, layout.HEADER_BYTES)
        for word in range(layout.OPEN_STEPS_WORD, layout.HEADER_BYTES // 8, layout.STEP_WORDS):
            try:
                yield from self._decoder.open_step(data, word * 8)
            except DamagedError:
                self.damaged += 1

    def skip_to_newest(self) -> None:
        """Take everything as read, so that ``history`` returns all records in the ring."""
        self.taken = self._newest()

    def commit(self, delivered: int) -> None:
        """Release the slots up to this record to the writer, and save the position for a later collector.

        Of records that are read and not delivered half a ring is kept: the writer needs the other half.
        """
        self._delivered = max(self._delivered, delivered)
        positions = max(self._delivered, self.taken - self.slots // 2), self._delivered
        if positions == self._committed:
            return
        if os.pwrite(self._descriptor, struct.pack("<2Q", *positions), layout.WORD_TAKEN * 8) != 16:
            raise OSError(f"{self.path}: the read position could not be written")
        self._committed = positions

    def close(self) -> None:
        os.close(self._descriptor)

    def _marks(self, first: int, count: int) -> Iterator[int]:
        """Yield the numbers of the finished records in ``count`` slots, from number ``first`` on."""
        mask = self.slots - 1
        while count:
            start = first & mask
            some = min(_CHUNK, count, self.slots - start)
            data = self._read(layout.SLOTS_OFFSET + start * layout.SLOT_BYTES, some * layout.SLOT_BYTES)
            for slot, mark in enumerate(_marks(data), start):
                if mark and (mark - slot) & mask == 0:
                    yield mark
            first, count = first + some, count - some

    def _newest(self) -> int:
        """Return the highest number of a finished record, ignoring a single wild mark in a damaged file."""
        marks = sorted(self._marks(0, self.slots))
        while len(marks) > 1 and marks[-1] - marks[-2] > self.slots:
            marks.pop()
        return marks[-1] if marks and marks[-1] < 1 << 62 else 0

    def _pass_over(self, first: int, alive: bool) -> bool:
        """Return whether slot ``first`` was abandoned: a later one is finished, and it never will be."""
        if self.is_exhausted:
            return False
        now = time.monotonic()
        if alive:
            if self._stuck_since is None:
                self._stuck_since = now
            if now - self._stuck_since < _PATIENCE_SECONDS:
                return False
        self._stuck_since = now
        # Each thread of a live process may have left a slot; of a dead one all slots are checked.
        marks = self._marks(first, min(_CHUNK, self.slots) if alive else self.slots)
        later = min((mark for mark in marks if first < mark < first + self.slots), default=0)
        if not later:
            self.is_exhausted = not alive
            return False
        self._stuck_since = None
        self.damaged += later - first
        self.taken = later - 1
        return True

    def _records(self, data: bytes, positions: Iterable[int]) -> list[Record]:
        """Decode the slots at these positions, without damaged ones and parts of records."""
        records, damaged = self._decoder.decode(data, positions)
        self.damaged += damaged
        self.last_ns = max(self.last_ns, self._decoder.last_ns)
        return records

    def _read_definitions(self) -> bytes:
        end = min(self._header()[layout.WORD_DEFINITIONS_END], layout.DEFINITIONS_BYTES)
        return self._read(layout.HEADER_BYTES, end)


def _whole(data: bytes, first: int) -> int:
    """Count the consecutive finished records from number ``first`` on."""
    marks = _marks(data)
    if marks == [*range(first, first + len(marks))]:
        return len(marks)
    return next((index for index, mark in enumerate(marks) if mark != first + index), len(marks))


def _marks(data: bytes) -> list[int]:
    """Return the last word of every slot."""
    words = layout.SLOT_BYTES // 8
    return memoryview(data).cast("Q")[words - 1 :: words].tolist()
