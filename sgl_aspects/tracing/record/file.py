"""A writer's ring file: created, locked, mapped, with its definitions and its control block."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import struct
import time

from sgl_aspects.files import OwnDescriptor, above_standard_streams
from sgl_aspects.run import clock
from sgl_aspects.tracing.record import format as layout

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
# A ring takes at most 1 / _SHARE of the free bytes.
_SHARE = 32


class RingFile:
    """The file of one process. ``words`` are the header's 64-bit numbers, ``memory`` is the whole file.

    A writer holds a lock on its file. The kernel releases it when the process is gone, however it ended, so
    that a new process with the same id cannot be mistaken for it.
    """

    def __init__(self, descriptor: int, memory: mmap.mmap, slots: int) -> None:
        self._descriptor = OwnDescriptor(descriptor)
        self.memory = memory
        self.words = memoryview(memory).cast("Q")
        self.slots = slots
        self._definitions = 0

    @classmethod
    def make(cls, folder: str, control: tuple[int, int, int]) -> RingFile | None:
        """Create a file in the run folder; None if that fails, with a warning unless the run has ended."""
        try:
            with above_standard_streams():
                return cls._made(folder, control)
        except OSError as error:
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                logger.warning("tracing stops in process %d: %s", os.getpid(), error)
            return None

    @classmethod
    def _made(cls, folder: str, control: tuple[int, int, int]) -> RingFile:
        path = os.path.join(folder, f"{os.getpid()}-{os.urandom(4).hex()}{layout.SUFFIX}")
        descriptor = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            slots = _allocate(descriptor)
            if slots < layout.SLOTS:
                _warn_of_small_ring(folder, slots)
            memory = _map(descriptor, layout.SLOTS_OFFSET + slots * layout.SLOT_BYTES)
            file = cls(descriptor, memory, slots)
            file._write_header(control, clock.offset_of(folder))
            _lock(descriptor)
            # Renamed when it is complete and locked, so that readers never see it before.
            os.rename(path + ".new", path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path + ".new")
            os.close(descriptor)
            raise
        return file

    def _write_header(self, control: tuple[int, int, int], clock_offset: int) -> None:
        self.words[layout.WORD_MAGIC] = int.from_bytes(layout.MAGIC, "little")
        self.words[layout.WORD_VERSION] = layout.VERSION
        self.words[layout.WORD_PROCESS_ID] = os.getpid()
        self.words[layout.WORD_STARTED_NS] = time.monotonic_ns()
        self.words[layout.WORD_CLOCK_OFFSET_NS] = clock_offset % (1 << 64)
        self.words[layout.WORD_SLOTS] = self.slots
        self.words[layout.WORD_SLOT_BYTES] = layout.SLOT_BYTES
        self.words[layout.WORD_DEFINITIONS_OFFSET] = layout.HEADER_BYTES
        self.words[layout.WORD_SLOTS_OFFSET] = layout.SLOTS_OFFSET
        for word, value in enumerate(control, layout.WORD_LEVEL):
            self.words[word] = value

    def define(self, text: str) -> int | None:
        """Add a definition and return its number, from 1 on; None if it does not fit. Not thread-safe."""
        data = text.encode()
        start = self.words[layout.WORD_DEFINITIONS_END]
        end = start + _LENGTH.size + len(data)
        if end > layout.DEFINITIONS_BYTES:
            return None
        offset = layout.HEADER_BYTES + start
        _LENGTH.pack_into(self.memory, offset, len(data))
        self.memory[offset + _LENGTH.size : layout.HEADER_BYTES + end] = data
        self.words[layout.WORD_DEFINITIONS_END] = end  # last: readers see complete definitions only
        self._definitions += 1
        return self._definitions

    def end(self, reason: int = layout.CLOSED) -> None:
        """Close the file. The mapping lives on for a thread that is just writing to it."""
        self.words[layout.WORD_CLOSED] = reason
        if self._descriptor.is_open():
            _lock(self._descriptor.number, fcntl.F_UNLCK)  # the mapping has a copy of the descriptor
            self._descriptor.close()
        else:
            self._descriptor.close(self.memory)

    def close(self) -> None:
        """Release the copy in a forked child, without marking the file closed."""
        self.words.release()
        self._descriptor.close(self.memory)


def _lock(descriptor: int, kind: int = fcntl.F_WRLCK) -> None:
    """Take an open-file-description lock, where available; ``fcntl.F_UNLCK`` releases it.

    A process-wide lock would be lost as soon as any code in the process has opened and closed the file. A
    forked child closes its copy.
    """
    try:
        whole = struct.pack("hhqqi", kind, os.SEEK_SET, 0, 0, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, whole)
    except (AttributeError, OSError):
        fcntl.lockf(descriptor, fcntl.LOCK_UN if kind == fcntl.F_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB)


def _map(descriptor: int, size: int) -> mmap.mmap:
    # Populated at once: a page's first touch would cost the engine more than the record.
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _warn_of_small_ring(folder: str, slots: int) -> None:
    system = os.statvfs(folder)
    logger.warning(
        "tracing has room for %d records in process %d, not for %d: %d of %d MiB are free in %s "
        "(give a container more shared memory, as with docker run --shm-size=1g; or raise ulimit -f)",
        slots,
        os.getpid(),
        layout.SLOTS,
        system.f_bavail * system.f_frsize >> 20,
        system.f_blocks * system.f_frsize >> 20,
        os.path.dirname(folder),
    )


def _allocate(descriptor: int) -> int:
    """Reserve the file's memory, for as many slots as fit.

    Writing to an unreserved page of a full file system would end the engine with SIGBUS. A ring takes only a
    part of the free space: the engine needs shared memory too, of which containers often have 64 MiB only.
    """
    slots = layout.SLOTS
    system = os.fstatvfs(descriptor)
    share = system.f_bavail * system.f_frsize // _SHARE
    while layout.SLOTS_OFFSET + slots * layout.SLOT_BYTES > share and slots > layout.FEWEST_SLOTS:
        slots //= 2
    while True:
        try:
            os.posix_fallocate(descriptor, 0, layout.SLOTS_OFFSET + slots * layout.SLOT_BYTES)
            return slots
        except OSError as error:
            # EFBIG: a limit on the size of this process's files (`ulimit -f`); EDQUOT: its user's quota
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT) or slots <= layout.FEWEST_SLOTS:
                raise
            os.ftruncate(descriptor, 0)
            slots //= 2
