"""Injection into processes that `sgl-aspects run --dormant` has prepared: through their control blocks."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sgl_aspects.attach.process_tree import Process
from sgl_aspects.bootstrap import dormant
from sgl_aspects.errors import AttachError

_START_SECONDS = 10.0


@dataclass(frozen=True)
class Prepared:
    """A process with a control block."""

    process: Process
    control: Path

    def run_file(self, path: Path, has_started: Callable[[], bool]) -> float:
        """Run the Python file ``path`` in a new thread of the process. Stops nothing: returns 0.0 seconds."""
        self.control.write_bytes(os.fsencode(path))
        os.kill(self.process.id, dormant.SIGNAL)
        deadline = time.monotonic() + _START_SECONDS
        while not has_started():
            if time.monotonic() > deadline:
                raise AttachError(
                    f"process {self.process.id} has run no Python for {_START_SECONDS:g} s, so it could "
                    "not look at its control block; try again"
                )
            time.sleep(0.002)
        return 0.0


def control_of(process: Process, user: int) -> Prepared | None:
    """Return None unless the process was prepared by ``user``, and is still the same one."""
    path = Path(dormant.folder_of(user), str(process.id))
    no_link = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        folder = os.open(path.parent, no_link | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        if os.fstat(folder).st_uid != user:
            return None  # another user's, who took the name
        descriptor = os.open(path.name, no_link, dir_fd=folder)
    except OSError:
        return None
    finally:
        os.close(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Prepared(process, path)
    finally:
        os.close(descriptor)
    return None  # not locked: a signal would end the process that has this id now
