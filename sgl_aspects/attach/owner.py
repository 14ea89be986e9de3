"""The user of a process, and whether the process has no more rights than all others of that user.

Only then may root attach for that user: what is run in the process lies in a folder that any process of the
user may write.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from sgl_aspects.errors import AttachError

_CAPABILITIES = ("CapPrm", "CapEff", "CapAmb")


@contextlib.contextmanager
def process_folder(process_id: int) -> Iterator[int]:
    """Open ``/proc/PID``: nothing is found through the descriptor once the process has ended, even if another
    one has its id.
    """
    descriptor = os.open(f"/proc/{process_id}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Owner:
    """A user, with the groups of one of its processes."""

    user: int
    group: int
    groups: tuple[int, ...]

    @classmethod
    def of(cls, process_id: int) -> Owner:
        """Return the process's owner. Raises ``AttachError`` if it has rights that its user lacks."""
        with process_folder(process_id) as folder:
            status = _status(folder, "status")
            owner = cls(
                int(status["Uid"].split()[0]),
                int(status["Gid"].split()[0]),
                tuple(map(int, status["Groups"].split())),
            )
            owner.require(process_id, folder)
        return owner

    def require(self, process_id: int, folder: int) -> None:
        """Raise ``AttachError`` unless the process is this user's and has no more rights than the user has.

        ``folder``: its folder below ``/proc``, open.
        """
        where = f"process {process_id}"
        for status in _of_each_thread(folder):
            ids = {"user": (self.user, status["Uid"]), "group": (self.group, status["Gid"])}
            for what, (wanted, found) in ids.items():
                if set(found.split()) != {str(wanted)}:
                    raise AttachError(
                        f"{where} runs with the {what} ids {', '.join(found.split())} (real, effective, "
                        f"saved, file system), not with {wanted} alone: start it as the user that it shall "
                        "be, with systemd's User= and Group= or setpriv"
                    )
            if any(int(status.get(name, "0"), 16) for name in _CAPABILITIES):
                raise AttachError(
                    f"{where} has capabilities that user {self.user}'s other processes lack, and attaching "
                    "would give them to each of those: start it without them"
                )
        if os.stat("mem", dir_fd=folder).st_uid != self.user:
            raise AttachError(
                f"{where} does not let user {self.user} debug it (it is not dumpable, as after a change of "
                "its user): start it as that user, with systemd's User= or setpriv"
            )
        if not os.path.samestat(os.stat("ns/user", dir_fd=folder), os.stat("/proc/self/ns/user")):
            raise AttachError(f"{where} runs in another user namespace: run the command inside it")


def _of_each_thread(folder: int) -> Iterator[dict[str, str]]:
    yield _status(folder, "status")
    threads = _opened_at(folder, "task")
    try:
        names = os.listdir(threads)
    finally:
        os.close(threads)
    for name in names:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            yield _status(folder, f"task/{name}/status")


def started(folder: int) -> int:
    """Return the start time of the process with this folder below ``/proc``, in clock ticks."""
    with open(_opened_at(folder, "stat")) as file:
        text = file.read()
    return int(text[text.rindex(")") + 2 :].split()[19])


def _opened_at(folder: int, name: str) -> int:
    return os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)


def _status(folder: int, name: str) -> dict[str, str]:
    with open(_opened_at(folder, name), encoding="utf-8", errors="replace") as file:
        return {key: value.strip() for key, _, value in (line.partition(":") for line in file)}
