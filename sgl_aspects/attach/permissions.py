"""Reasons why a process cannot be attached to: one line with the setting and the command that help."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from sgl_aspects.attach.debugging import connection
from sgl_aspects.attach.process_tree import Process
from sgl_aspects.errors import AttachError

_PTRACE = 19  # CAP_SYS_PTRACE
_ELF_X86_64 = 62
_DORMANT = "or start it prepared: sgl-aspects run --dormant -- COMMAND"


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
    same_files: bool
    machine: int | None
    our_machine: str
    seccomp: int

    @classmethod
    def of(cls, process: Process) -> Facts:
        status, ours = _status(process.id), _status(os.getpid())
        capabilities = int(ours["CapEff"], 16)
        return cls(
            process_id=process.id,
            user=int(status["Uid"].split()[0]),
            our_user=os.geteuid(),
            has_capability=connection() is not None or bool(capabilities >> _PTRACE & 1),
            ptrace_scope=_ptrace_scope(),
            tracer=int(status["TracerPid"]),
            is_stopped=status["State"].startswith("T"),
            same_files=_same_files(process.id),
            machine=_machine(process.id),
            our_machine=platform.machine(),
            seccomp=int(ours.get("Seccomp", "0")),
        )


def check(process: Process, *, needs_ptrace: bool = True) -> None:
    """Raise ``AttachError`` if ``process`` cannot be attached to. Nothing is touched."""
    try:
        facts = Facts.of(process)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise AttachError(f"process {process.id} has ended") from error
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
    if not facts.same_files:
        return (
            f"{where} runs in another container (mount namespace): run the command inside it, "
            f"docker exec CONTAINER {again} or kubectl exec POD -- {again}"
        )
    if facts.is_stopped:
        return f"{where} is stopped: let it go on first, with kill -CONT {facts.process_id}"
    if not needs_ptrace:
        return None
    if facts.our_machine != "x86_64" or facts.machine not in (_ELF_X86_64, None):
        return (
            f"{where}: before Python 3.14 attaching works between x86-64 processes only, this machine is "
            f"{facts.our_machine} and the process's ELF machine {facts.machine}: start it prepared, "
            "sgl-aspects run --dormant -- COMMAND"
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
    seccomp = int(_status(os.getpid()).get("Seccomp", "0"))
    if seccomp == 2:
        return AttachError(
            f"process {process_id}: {error.strerror}; a seccomp filter (of a container) is in force here and "
            "may forbid ptrace: docker run --cap-add SYS_PTRACE or --security-opt seccomp=unconfined; "
            + _DORMANT
        )
    return AttachError(
        f"process {process_id}: {error.strerror}; it has more capabilities than you, or a security module "
        f"forbids it (see dmesg): sudo sgl-aspects attach {process_id}; {_DORMANT}"
    )


def _status(process_id: int) -> dict[str, str]:
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def may_trace() -> str | None:
    """Return why this user cannot attach to programs of its own with ptrace; None if it can."""
    scope, capabilities = _ptrace_scope(), int(_status(os.getpid())["CapEff"], 16)
    if scope == 3:
        return "kernel.yama.ptrace_scope is 3: nobody may attach"
    if scope and not capabilities >> _PTRACE & 1:
        return f"kernel.yama.ptrace_scope is {scope}, and CAP_SYS_PTRACE is missing"
    return None


def _ptrace_scope() -> int:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except FileNotFoundError:  # a kernel without Yama
        return 0


def _same_files(process_id: int) -> bool:
    try:
        return os.readlink(f"/proc/{process_id}/ns/mnt") == os.readlink("/proc/self/ns/mnt")
    except PermissionError:
        return True  # reported by its owner, or by the next attempt


def _machine(process_id: int) -> int | None:
    try:
        with open(f"/proc/{process_id}/exe", "rb") as file:
            header = file.read(20)
    except PermissionError:
        return None
    return int.from_bytes(header[18:20], "little") if header[:4] == b"\x7fELF" else -1
