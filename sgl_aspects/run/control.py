"""Live control: changes from outside what a run records, through the control blocks of its rings.

A control block is three numbers in the header of a ring (see `sgl_aspects.tracing.record`). A traced process
reads them with each request and each step: no signal, no socket, no thread. Processes that start later read
the same numbers from the run's folder.

The first number is the level in its lowest byte, and 1 in the next one where a command asks something that
concerns steps (see :mod:`sgl_aspects.run.requests`); the process takes that away when it looks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sgl_aspects.files import read_small, unfollowed, write_private

#: Where a ring has its control block, and the number there that keeps every request.
OFFSET = 256
SAMPLE_ALL = 1 << 32
#: The part of the first number that is the level.
LEVEL_MASK = 0xFF
_FILE = "control"
_BLOCK = struct.Struct("<3Q")
ASKED_OFFSET = OFFSET + 1


@dataclass(frozen=True)
class Control:
    """``level`` is in force, 0 is off; ``wanted`` is the level that "on" restores; ``sample`` a share, 0 to
    1.
    """

    level: int
    wanted: int
    sample: float = 1.0

    def changed(
        self, *, level: int | None = None, sample: float | None = None, on: bool | None = None
    ) -> Control:
        """Return a copy with the arguments that are not None; a level that is set is in force unless off."""
        wanted = self.wanted if level is None or level == 0 else level
        is_on = on if on is not None else (bool(self.level) if level is None else level > 0)
        return Control(
            wanted if is_on else 0, wanted or 3, self.sample if sample is None else min(max(sample, 0.0), 1.0)
        )

    @property
    def words(self) -> tuple[int, int, int]:
        """The numbers of a ring's header."""
        return self.level, self.wanted, round(self.sample * SAMPLE_ALL)

    def pack(self) -> bytes:
        return _BLOCK.pack(*self.words)

    @classmethod
    def unpack(cls, data: bytes) -> Control:
        level, wanted, sample = _BLOCK.unpack(data)
        return cls(level & LEVEL_MASK, wanted, sample / SAMPLE_ALL)


def read_control(ring: Path) -> Control:
    """Read the control block of a ring."""
    with open(ring, "rb", opener=unfollowed) as file:
        file.seek(OFFSET)
        return Control.unpack(file.read(_BLOCK.size))


def write_control(ring: Path, control: Control) -> None:
    """Write ``control``: the ring's process applies it from its next request or step on.

    Raises ``PermissionError`` for another user's run, also for root: that user chooses what is in its folder.
    """
    block = control.pack()
    # The bytes between them stay.
    _write(ring, (block[:1], OFFSET), (block[8:], OFFSET + 8))


def write_asked(ring: Path) -> None:
    """Have the ring's process look for requests before its next step. Raises like ``write_control``."""
    _write(ring, (b"\1", ASKED_OFFSET))


def _write(ring: Path, *parts: tuple[bytes, int]) -> None:
    with own_folder(ring.parent) as folder:
        descriptor = os.open(ring.name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
        try:
            for data, offset in parts:
                os.pwrite(descriptor, data, offset)
        finally:
            os.close(descriptor)


def write_run_control(folder: Path, control: Control) -> None:
    """Write the setting for processes of the run that start from now on. Raises like ``write_control``."""
    with own_folder(folder):
        write_private(folder / _FILE, control.pack())


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[int]:
    """Give a descriptor of a run's folder. Raises like ``write_control``."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        owner = os.fstat(descriptor).st_uid
        if owner != os.geteuid():
            raise PermissionError(errno.EPERM, f"the run is user {owner}'s", str(folder))
        yield descriptor
    finally:
        os.close(descriptor)


def run_control(folder: str) -> Control | None:
    """Read what ``write_run_control`` wrote; None if nothing was changed or it is not readable."""
    try:
        return Control.unpack(read_small(Path(folder, _FILE)))
    except (OSError, struct.error):
        return None
