"""The folder of a run, in which its processes record; a process holds it while it may still record."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from sgl_aspects import env
from sgl_aspects.errors import ConfigError
from sgl_aspects.files import OwnDescriptor, read_small, unfollowed, write_private
from sgl_aspects.run import clock

CLOSING = "closing"
_PREFIX = "sgl-aspects-"
# Locked, shared, by every process of the run that may still record.
_HELD = "held"

# In a run of attach: empty until all of its processes are woven, then the time.
_WOVEN = "woven"

_LEAST_BYTES = 4 << 20
_LEAST_FILES = 64
_REMOVALS = 3
_LONGEST_COMMAND = 100
_UNITS = {"days": 86400, "h": 3600, "min": 60, "s": 1}


def make_run_folder(least_bytes: int = _LEAST_BYTES) -> str:
    """Make a folder that only this user may enter: in memory if available, with room for so much.

    Raises ``ConfigError`` if there is no place for it.
    """
    for parent in ("/dev/shm", env.runtime_folder()):
        if parent and os.access(parent, os.W_OK | os.X_OK):
            with contextlib.suppress(OSError):
                if _has_room(parent, least_bytes):
                    return _make_in(parent)
    try:
        return _make_in(None)
    except OSError as error:
        raise ConfigError(
            "tracing has no folder for its records: /dev/shm, XDG_RUNTIME_DIR and the temporary folder "
            f"cannot be written ({error}); set TMPDIR to a folder that can"
        ) from error


def _make_in(parent: str | None) -> str:
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
    try:
        clock.begin(folder)
        if (sealed := seal_run(folder)) is None:
            raise OSError(errno.ENOLCK, "its file system has no locks")
        os.close(sealed)
    except OSError:
        remove_run_folder(folder)
        raise
    return folder


def _has_room(folder: str, least_bytes: int) -> bool:
    """Return whether so many bytes and some files fit; some file systems report 0 files for unlimited."""
    system = os.statvfs(folder)
    has_files = not system.f_files or system.f_favail >= _LEAST_FILES
    return has_files and system.f_bavail * system.f_frsize >= least_bytes


def remove_run_folder(folder: str) -> None:
    """Remove the folder, also while another process makes a last file in it."""
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return


def begin_weaving(folder: Path) -> None:
    """Note that processes of the run are being woven while they serve."""
    write_private(folder / _WOVEN, b"")


def end_weaving(folder: Path) -> None:
    """Note that all of them are woven now: requests are seen as a whole from here on."""
    write_private(folder / _WOVEN, str(clock.unix_ns(folder)).encode())


def woven_ns(folder: Path) -> float:
    """Return when the last process was woven: infinity while they are being woven, 0 if they never were."""
    try:
        return float(read_small(folder / _WOVEN) or "inf")
    except (OSError, ValueError):
        return 0.0


class RunHold:
    """Keeps a run from ending until it is closed, here and in every forked child.

    The mapping keeps the lock in a child that closes all descriptors, as daemons do.
    """

    def __init__(self, descriptor: int) -> None:
        self._mapping: mmap.mmap | None = None
        with contextlib.suppress(OSError, ValueError):
            os.ftruncate(descriptor, 1)
            self._mapping = mmap.mmap(descriptor, 1, prot=mmap.PROT_READ)
        self._descriptor = OwnDescriptor(descriptor)

    def close(self) -> None:
        self._descriptor.close(self._mapping)


def hold_run(folder: str) -> RunHold | None:
    """Hold the run; None if it has ended, or is about to."""
    descriptor = _locked(folder, fcntl.LOCK_SH)
    if descriptor is not None and Path(folder, CLOSING).exists():
        os.close(descriptor)
        return None
    return None if descriptor is None else RunHold(descriptor)


def seal_run(folder: str) -> int | None:
    """Return a descriptor that keeps processes from holding the run while it is open; None if one does."""
    return _locked(folder, fcntl.LOCK_EX)


def _locked(folder: str, kind: int) -> int | None:
    try:
        descriptor = unfollowed(os.path.join(folder, _HELD), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def runs() -> list[Path]:
    """Return the folders of this user's runs on this machine, oldest first."""
    found = []
    parents = ["/dev/shm", env.runtime_folder()]
    with contextlib.suppress(FileNotFoundError):  # no folder of temporary files, so no runs there
        parents.append(tempfile.gettempdir())
    for parent in parents:
        for path in Path(parent).glob(f"{_PREFIX}*") if parent else ():
            try:
                status = path.lstat()
            except FileNotFoundError:  # a run that has just ended
                continue
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                found.append((status.st_ctime, path))
    return list(dict.fromkeys(path for _, path in sorted(found)))


def describe_run(folder: Path, process_ids: Sequence[int], *, is_elsewhere: bool = False) -> str:
    """Return a run's folder, its age, these processes of it, and the command line of the first.

    ``is_elsewhere``: it is another container's, with processes that have these ids only there.
    """
    try:
        words = read_small(Path(f"/proc/{process_ids[0]}/cmdline")).replace(b"\0", b" ")
        command = words.decode(errors="replace").strip()[:_LONGEST_COMMAND]
    except OSError:
        command = "ended"
    if is_elsewhere:
        command = "of another container"
    seconds = time.time() - clock.begun(folder)
    age = next(
        f"{seconds / unit:.0f} {name}" for name, unit in _UNITS.items() if seconds >= 2 * unit or unit == 1
    )
    return f"{folder}, {age} old, process {', '.join(map(str, process_ids))}: {command}"
