"""The clock of a run: the system's monotonic one, which nobody sets. Records hold its readings.

Unix time is such a reading plus an offset that is taken once, as the run begins: so all processes and readers
of a run agree, and no duration changes, whatever the wall clock is set to meanwhile.
"""

from __future__ import annotations

from pathlib import Path
from time import monotonic_ns, time, time_ns

from sgl_aspects.files import read_small, write_private

_FILE = "clock"
_READINGS = 8


def unix_offset() -> int:
    """Return Unix time less the monotonic clock now, in nanoseconds, from the quickest of some readings."""
    readings = []
    for _ in range(_READINGS):
        before, unix, after = monotonic_ns(), time_ns(), monotonic_ns()
        readings.append((after - before, unix - (before + after) // 2))
    return min(readings)[1]


def begin(folder: str) -> None:
    """Take the offset of the run in this folder.

    :raises OSError: it cannot be written.
    """
    write_private(Path(folder, _FILE), b"%d" % unix_offset())


def offset_of(folder: str | Path) -> int:
    """Return the offset of the run in this folder; the present one if the folder has none."""
    try:
        return int(read_small(Path(folder, _FILE)))
    except (OSError, ValueError):
        return unix_offset()


def unix_ns(folder: str | Path) -> int:
    """Return Unix time now, as the records of the run in this folder have it."""
    return monotonic_ns() + offset_of(folder)


def begun(folder: str | Path) -> float:
    """Return when the run in this folder began, in seconds of Unix time; now if that is not known."""
    try:
        return Path(folder, _FILE).lstat().st_mtime
    except OSError:
        return time()
