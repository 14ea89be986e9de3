"""Files that other processes read, and descriptors that other code may close."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SMALL = 4096
# `struct flock`: type and whence stand first on Linux, last on macOS and the BSDs.
_IS_LINUX = sys.platform == "linux"
_FLOCK = struct.Struct("hhqqi4x" if _IS_LINUX else "qqihh")


def write_private(path: Path, data: bytes) -> None:
    """Write the whole file or nothing, for this user only, whatever the umask.

    :raises OSError: it cannot be written; the old contents stay.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def private(path: str, flags: int) -> int:
    """Open a file that the user named, for this user only where it is made: the ``opener`` of :func:`open`.

    In a folder such as ``/tmp`` another user may have taken the name: neither that user's file is written
    to, nor what a link of that user's leads to. ``/dev/stdout`` and links of this user's are followed.

    :raises PermissionError: it is another user's.
    """
    trusted, folder = (0, os.geteuid()), os.stat(os.path.dirname(path) or ".")

    def require_trusted(status: os.stat_result) -> None:
        what = None
        if status.st_uid not in trusted and not stat.S_ISCHR(status.st_mode):  # a terminal has its own user
            what = f"it is user {status.st_uid}'s; name another file"
        elif stat.S_ISREG(status.st_mode) and status.st_nlink > 1 and not is_ours:
            what = "it has another name, and another user may have given it this one; name another file"
        if what is not None:
            raise PermissionError(errno.EPERM, what, path)

    is_ours = folder.st_uid in trusted and not folder.st_mode & 0o022
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISLNK((found := os.lstat(path)).st_mode):
            require_trusted(found)  # already here: opening a pipe would wait for its other end
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        link = os.lstat(path)  # of root's link somewhere else another user may have made this one
        if not {link.st_uid, folder.st_uid} <= {*trusted} or (link.st_nlink > 1 and not is_ours):
            what = "it is another user's link, or in that user's folder; name another file"
            raise PermissionError(errno.EPERM, what, path) from error
        return os.open(path, flags, 0o600)
    try:
        require_trusted(status := os.fstat(descriptor))
    except PermissionError:
        os.close(descriptor)
        raise
    if flags & os.O_TRUNC and stat.S_ISREG(status.st_mode):
        os.ftruncate(descriptor, 0)
    return descriptor


def unfollowed(path: str, flags: int) -> int:
    """Open a file in a folder of any user: no link is followed, no pipe waited for. Also an ``opener``."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def read_small(path: Path, most: int = _SMALL) -> bytes:
    """Read the beginning of a file in a folder of any user: ``most`` bytes of a file that is not a link.

    :raises OSError: there is no such file, or it cannot be read.
    """
    with open(path, "rb", opener=unfollowed) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        return file.read(most)


@contextlib.contextmanager
def above_standard_streams() -> Iterator[None]:
    """Have files that are opened in the block, and copies of their descriptors, get numbers above 2.

    What a daemon prints that has closed its standard streams would be written to them.
    """
    taken = []
    try:
        while (descriptor := os.open("/", getattr(os, "O_PATH", os.O_RDONLY))) <= 2:
            taken.append(descriptor)
        os.close(descriptor)
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


def lock_holder(descriptor: int, byte: int = 0) -> int | None:
    """Return the id of a process that has locked this byte with ``fcntl.lockf``; None if no other has.

    -1: the lock is of an open file, not of a process.

    :raises OSError: a system or a file system that does not tell.
    """
    what, where = (fcntl.F_WRLCK, os.SEEK_SET), (byte, 1, 0)
    asked = _FLOCK.pack(*what, *where) if _IS_LINUX else _FLOCK.pack(*where, *what)
    found = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    kind, process_id = (found[0], found[4]) if _IS_LINUX else (found[3], found[2])
    return None if kind == fcntl.F_UNLCK else int(process_id)


class OwnDescriptor:
    """An open descriptor, used only while it still is this file.

    A process that becomes a daemon closes all descriptors, and files that it opens later get their numbers.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._file = _file_of(number)

    def is_open(self) -> bool:
        return self._file is not None and _file_of(self.number) == self._file

    def close(self, mapping: mmap.mmap | None = None) -> None:
        """Close it, and first ``mapping``, which has a copy of it.

        Where the process has closed both, the mapping is kept: it would close what has its number now.
        """
        if self.is_open():
            if mapping is not None:
                mapping.close()
            self._file = None
            os.close(self.number)
        elif mapping is not None:
            _kept.append(mapping)


_kept: list[mmap.mmap] = []


def _file_of(number: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino
