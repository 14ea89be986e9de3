"""Whether a process may be attached to: what the kernel allows this user, and what root may do for another.

Root attaches for the user of a process only if the process has no more rights than all others of that user:
what is run in it lies in a folder that any process of the user may write.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sgl_aspects.errors import AttachError
from sgl_aspects.run.processes import stat_of

_PTRACE = 19  # CAP_SYS_PTRACE
_CAPABILITIES = ("CapPrm", "CapEff", "CapAmb")
_DORMANT = "or start it prepared: sgl-aspects run --dormant -- COMMAND"


@contextlib.contextmanager
def process_folder(process_id: int) -> Iterator[Path]:
    """Open ``/proc/PID``, and give a path to it: nothing is found there once the process has ended, even if
    another one has its id.
    """
    descriptor = os.open(f"/proc/{process_id}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def started(folder: Path) -> int:
    """Return the start time of the process with this folder, in clock ticks."""
    return int(stat_of(folder)[19])


def _status(folder: Path) -> dict[str, str]:
    lines = (folder / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


# -- what root may do for the user of a process ------------------------------------------------------------


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
            status = _status(folder)
            owner = cls(
                int(status["Uid"].split()[0]),
                int(status["Gid"].split()[0]),
                tuple(map(int, status["Groups"].split())),
            )
            owner.require(process_id, folder)
        return owner

    def require(self, process_id: int, folder: Path) -> None:
        """Raise ``AttachError`` unless the process is this user's and has no more rights than the user has.

        ``folder``: of :func:`process_folder`.
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
        if (folder / "mem").stat().st_uid != self.user:
            raise AttachError(
                f"{where} does not let user {self.user} debug it (it is not dumpable, as after a change of "
                "its user): start it as that user, with systemd's User= or setpriv"
            )
        if not _is_same_namespace(folder, "user"):
            raise AttachError(f"{where} runs in another user namespace: run the command inside it")


def _of_each_thread(folder: Path) -> Iterator[dict[str, str]]:
    yield _status(folder)
    for thread in (folder / "task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            yield _status(thread)


def _is_same_namespace(folder: Path, kind: str) -> bool:
    return os.path.samefile(folder / "ns" / kind, f"/proc/self/ns/{kind}")


# -- what the kernel allows --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """The facts that decide whether this process may attach to another one."""

    process_id: int
    user: int
    our_user: int
    has_capability: bool
    ptrace_scope: int
    tracer: int
    is_stopped: bool
    is_inside: bool
    """It has the same files and process numbers: its root and its mount and PID namespaces are ours."""
    machine: str

    @classmethod
    def of(cls, process_id: int, *, has_capability: bool) -> Facts:
        with process_folder(process_id) as folder:
            status = _status(folder)
            try:
                is_inside = all(_is_same_namespace(folder, kind) for kind in ("mnt", "pid"))
                is_inside = is_inside and os.path.samefile(folder / "root", "/")
            except PermissionError:
                is_inside = True  # reported by its owner, or by the next attempt
        return cls(
            process_id=process_id,
            user=int(status["Uid"].split()[0]),
            our_user=os.geteuid(),
            has_capability=has_capability or has_trace_capability(),
            ptrace_scope=_ptrace_scope(),
            tracer=int(status["TracerPid"]),
            is_stopped=status["State"].startswith("T"),
            is_inside=is_inside,
            machine=platform.machine(),
        )


def check(process_id: int, *, needs_ptrace: bool = True, has_capability: bool = False) -> None:
    """Raise ``AttachError`` if the process cannot be attached to. Nothing is touched.

    ``has_capability``: another process, which has CAP_SYS_PTRACE, debugs for this one.
    """
    try:
        facts = Facts.of(process_id, has_capability=has_capability)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise AttachError(f"process {process_id} has ended") from error
    reason = refusal(facts, needs_ptrace=needs_ptrace)
    if reason is not None:
        raise AttachError(reason)


def refusal(facts: Facts, *, needs_ptrace: bool = True) -> str | None:
    """Return the line with the reason; None if no obstacle is known."""
    where = f"process {facts.process_id}"
    again = f"sgl-aspects attach {facts.process_id}"
    if facts.user != facts.our_user and not (facts.our_user == 0 and facts.has_capability):
        help = "in a container docker run --cap-add SYS_PTRACE" if facts.our_user == 0 else f"sudo {again}"
        return f"{where} belongs to user {facts.user}, you are {facts.our_user}: {help}"
    if not facts.is_inside:
        return (
            f"{where} runs in another container or a chroot: run the command inside it, "
            f"docker exec CONTAINER {again} or kubectl exec POD -- {again}"
        )
    if facts.is_stopped:
        return f"{where} is stopped: let it go on first, with kill -CONT {facts.process_id}"
    if not needs_ptrace:
        return None
    if facts.machine != "x86_64":
        return (
            f"{where}: before Python 3.14 attaching works on x86-64 only, this machine is {facts.machine}; "
            + _DORMANT
        )
    if facts.tracer:
        return f"{where} is traced by process {facts.tracer}, a debugger or strace: end that one first"
    if facts.ptrace_scope == 3:
        return f"kernel.yama.ptrace_scope is 3, which forbids attaching until the next boot; {_DORMANT}"
    if facts.ptrace_scope and not facts.has_capability:
        return (
            f"kernel.yama.ptrace_scope is {facts.ptrace_scope}: sudo {again}, "
            "sudo sysctl kernel.yama.ptrace_scope=0, in a container docker run --cap-add SYS_PTRACE; "
            + _DORMANT
        )
    return None


def explained(process_id: int, error: OSError) -> AttachError:
    """Explain an unforeseen refusal by the kernel."""
    return AttachError(
        f"process {process_id}: {error.strerror}; it has more capabilities than you (sudo sgl-aspects attach "
        f"{process_id}), a container's seccomp filter forbids ptrace (docker run --cap-add SYS_PTRACE or "
        f"--security-opt seccomp=unconfined), or a security module does (see dmesg); {_DORMANT}"
    )


def may_trace() -> str | None:
    """Return why this user cannot attach to programs of its own with ptrace; None if it can."""
    if not os.path.exists("/proc/self"):
        return "/proc is not mounted"
    scope = _ptrace_scope()
    if scope == 3:
        return "kernel.yama.ptrace_scope is 3: nobody may attach"
    if scope and not has_trace_capability():
        return f"kernel.yama.ptrace_scope is {scope}, and CAP_SYS_PTRACE is missing"
    return None


def has_trace_capability() -> bool:
    return bool(int(_status(Path("/proc/self"))["CapEff"], 16) >> _PTRACE & 1)


def _ptrace_scope() -> int:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except FileNotFoundError:  # a kernel without Yama
        return 0
