"""A file that several collectors may write to: each addition is complete or absent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator

from sgl_aspects.files import lock_holder, private

_PIECE = 1 << 16
# The byte, after any content, on which each process that writes to the file has a shared lock.
_WRITERS = 1 << 62


class SharedFile:
    """A file, truncated unless ``append``. Raises ``OSError`` if it cannot be written, is a pipe other than
    standard output, or is to be truncated while another process has it open.

    A new file is for this user only. What a killed collector had begun to write after the last whole line is
    removed.
    """

    def __init__(self, path: str, *, append: bool = False) -> None:
        self._descriptor = private(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        status = os.fstat(self._descriptor)
        self.is_regular = stat.S_ISREG(status.st_mode)
        self.is_closed = False
        try:
            if stat.S_ISFIFO(status.st_mode) and not _is_standard(status):
                # A collector lacks its descriptor, or its reader sees the end once a first writer closes it.
                raise OSError(errno.ESPIPE, "it is a pipe; name a file, or write to /dev/stdout")
            if self.is_regular:
                self._take(append=append)
        except OSError:
            os.close(self._descriptor)
            raise

    def _take(self, *, append: bool) -> None:
        """Note this process as a writer, until it closes the file."""
        with self.locked() as size:
            if not append:
                self._require_no_writer()
                os.ftruncate(self._descriptor, 0)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _WRITERS)
            if append and size and self.read(1, size - 1) != b"\n":
                self._cut_off(size)

    def _require_no_writer(self) -> None:
        try:
            process_id = lock_holder(self._descriptor, _WRITERS)
        except OSError:
            return  # a file system without locks
        if process_id is not None:
            who = f"process {process_id} of another run" if process_id > 0 else "another container or host"
            what = f"{who} writes to it; name another file, or end that run"
            raise OSError(errno.EBUSY, what)

    def _cut_off(self, size: int) -> None:
        """Truncate to the last end of a line."""
        end = size
        while end:
            start = max(0, end - _PIECE)
            found = self.read(end - start, start).rfind(b"\n")
            end = start + found + 1 if found >= 0 else start
            if found >= 0:
                break
        os.ftruncate(self._descriptor, end)

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Lock out other collectors, where there are locks; returns the file's size, 0 for a pipe."""
        self._lock(fcntl.LOCK_EX)
        try:
            yield os.fstat(self._descriptor).st_size if self.is_regular else 0
        finally:
            self._lock(fcntl.LOCK_UN)

    def _lock(self, kind: int) -> None:
        with contextlib.suppress(OSError):  # Lustre without `-o flock`, NFS whose lock service is not reached
            fcntl.flock(self._descriptor, kind)

    def read(self, size: int, position: int) -> bytes:
        return os.pread(self._descriptor, size, position)

    def write(self, data: bytes, position: int) -> None:
        """Write ``data`` as the file's end; on a full disk the file is truncated to ``position``."""
        rest = memoryview(data)
        try:
            while rest:
                if self.is_regular:
                    done = os.pwrite(self._descriptor, rest, position + len(data) - len(rest))
                else:
                    done = os.write(self._descriptor, rest)
                rest = rest[done:]
        except OSError:
            if self.is_regular:
                os.ftruncate(self._descriptor, position)
            raise

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            os.close(self._descriptor)


def _is_standard(status: os.stat_result) -> bool:
    """Return whether the file is standard output or standard error."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(number), status):
                return True
    return False
