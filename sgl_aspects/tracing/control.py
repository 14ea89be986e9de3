"""Live control: changes from outside what a run records, through the control blocks of its rings.

A control block is three numbers in the header of a ring (docs/recorder.md). A traced process reads them with
each request and each step: no signal, no socket, no thread. Processes that start later read the same numbers
from the run's folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sgl_aspects import env
from sgl_aspects.errors import ConfigError
from sgl_aspects.files import write_private
from sgl_aspects.tracing.ring import format as layout
from sgl_aspects.tracing.ring.decoder import DamagedError
from sgl_aspects.tracing.ring.reader import RingReader

FOLDER_PREFIX = "sgl-aspects-"
_FILE = "control"
_BLOCK = struct.Struct("<3Q")
_OFFSET = layout.WORD_LEVEL * 8


@dataclass(frozen=True)
class Control:
    """``level`` is in force, 0 is off; ``wanted`` is the level restored after off; ``sample`` a share, 0 to
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
        return self.level, self.wanted, round(self.sample * layout.SAMPLE_ALL)

    def pack(self) -> bytes:
        return _BLOCK.pack(*self.words)

    @classmethod
    def unpack(cls, data: bytes) -> Control:
        level, wanted, sample = _BLOCK.unpack(data)
        return cls(level, wanted, sample / layout.SAMPLE_ALL)


def runs() -> list[Path]:
    """Return the folders of this user's runs on this machine, oldest first."""
    found = []
    parents = ["/dev/shm", env.runtime_folder()]
    with contextlib.suppress(FileNotFoundError):  # no folder of temporary files, so no runs there
        parents.append(tempfile.gettempdir())
    for parent in parents:
        for path in Path(parent).glob(FOLDER_PREFIX + "*") if parent else ():
            try:
                status = path.lstat()
            except FileNotFoundError:  # a run that has just ended
                continue
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
                found.append((status.st_ctime, path))
    return list(dict.fromkeys(path for _, path in sorted(found)))


def rings(folder: str | None = None, process_id: int | None = None) -> Iterator[RingReader]:
    """Open the rings of one run for reading; with ``folder`` None those of the only run.

    ``process_id`` selects that process's ring alone. Raises ``ConfigError`` if the run is ambiguous or there
    is none. The caller closes each ring.
    """
    folders = runs() if folder is None else [Path(folder)]
    pattern = f"{'*' if process_id is None else process_id}-*{layout.SUFFIX}"
    found = sorted(ring for run in folders for ring in run.glob(pattern))
    if not found:
        of = "this user" if folder is None else repr(folder)
        if process_id is not None:
            of = f"process {process_id}"
        raise ConfigError(
            f"no traced run of {of} found: start the engine with SGL_ASPECTS_TRACE=1 or more, "
            "or name the folder of a run with --run"
        )
    # a crashed run's leftovers do not count while another run is alive
    if len({path.parent for path in found}) > 1:
        living = {path.parent for path in found if _is_written(path)}
        found = [path for path in found if path.parent in living] or found
    processes: dict[Path, list[str]] = {}
    for path in found:
        processes.setdefault(path.parent, []).append(path.name.split("-")[0])
    if len(processes) > 1:
        names = "; ".join(f"{run} (process {', '.join(of_run)})" for run, of_run in processes.items())
        raise ConfigError(f"several runs are traced: choose one with --run FOLDER or --pid PID: {names}")
    readable = 0
    for path in found:
        try:
            ring = RingReader(path, read_only=True)
        except (DamagedError, OSError):
            continue
        readable += 1
        yield ring
    if not readable:
        raise ConfigError(
            f"{found[0].parent}: none of its rings can be read: they are damaged, of another version of "
            "sgl-aspects, or another user's"
        )


def _is_written(path: Path) -> bool:
    """Return whether the ring's process is alive."""
    try:
        ring = RingReader(path, read_only=True)
    except (DamagedError, OSError):
        return False
    with contextlib.closing(ring):
        return ring.is_alive()


def read_control(ring: Path) -> Control:
    """Read the control block of a ring."""
    with ring.open("rb") as file:
        file.seek(_OFFSET)
        return Control.unpack(file.read(_BLOCK.size))


def write_control(ring: Path, control: Control) -> None:
    """Write ``control``: the ring's process applies it from its next request or step on.

    Raises ``PermissionError`` for another user's run, also for root: that user chooses what is in its folder.
    """
    with _own_folder(ring.parent) as folder:
        descriptor = os.open(ring.name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
        try:
            os.pwrite(descriptor, control.pack(), _OFFSET)
        finally:
            os.close(descriptor)


def write_run_control(folder: Path, control: Control) -> None:
    """Write the setting for processes of the run that start from now on. Raises like ``write_control``."""
    with _own_folder(folder):
        write_private(folder / _FILE, control.pack())


@contextlib.contextmanager
def _own_folder(folder: Path) -> Iterator[int]:
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
        return Control.unpack(Path(folder, _FILE).read_bytes())
    except (OSError, struct.error):
        return None
