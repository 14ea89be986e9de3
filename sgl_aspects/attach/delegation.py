"""Root's command on another user's process, run as that user.

    root's command ── shows what is printed, passes Ctrl-C on
      ├─ debugging    root's, too: stops threads, reads and writes memory, on request
      └─ the command  the user's: the run's folder, the interpreter, the collector, the guard

The user can read and change everything in the second process, also its descriptors. So it has no terminal,
no folder, no file and no variable of root's, and what it prints is data.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import os
import platform
import pwd
import resource
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TextIO

import sgl_aspects
from sgl_aspects import isolated
from sgl_aspects.attach.process_tree import Process
from sgl_aspects.attach.rights import Owner
from sgl_aspects.errors import AttachError
from sgl_aspects.run.collector import is_for_collector
from sgl_aspects.terminal import printable

_READ_BYTES = 1 << 16
_LOOK_SECONDS = 0.1
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Of root's environment, besides what the collector reads: how texts are shown, and where packages are.
_KEPT = ("LANG", "LANGUAGE", "LC_", "TZ", "NO_COLOR", "PYTHONPATH")

_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVILEGES, _AMBIENT, _CLEAR_ALL = 1, 38, 47, 4
_JOIN_SESSION, _THIS_PROCESS = 1, 1
# The numbers of the system calls keyctl and ioprio_set.
_KEYCTL, _IO_PRIORITY = {"x86_64": (250, 251), "aarch64": (219, 30)}.get(platform.machine(), (None, None))


def owner_to_become(processes: Sequence[Process]) -> Owner | None:
    """Return the user whose processes these are, if this command is root's and they are not; otherwise None.

    Raises ``AttachError`` if they are of several users, or one has rights that its user lacks.
    """
    if os.geteuid() != 0:
        return None
    by_user: dict[int, Process] = {}
    owner = None
    for process in processes:
        try:
            by_user.setdefault(os.stat(f"/proc/{process.id}").st_uid, process)
            if by_user.keys() != {0}:
                owner = Owner.of(process.id)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise AttachError(f"process {process.id} has ended") from error
    if len(by_user) > 1:
        whose = " and ".join(f"process {process.id} to user {user}" for user, process in by_user.items())
        raise AttachError(f"an engine of several users ({whose}) cannot be attached to: start it as one user")
    return owner


def run_as(owner: Owner, module: str, words: Sequence[str], processes: Sequence[Process]) -> int:
    """Run ``module`` as ``owner``, who may debug ``processes`` by root's right; returns its exit status.

    The module gets a socket's number before its words, for :func:`sgl_aspects.attach.debugging.use_debugger`.
    """
    _share_fate(processes[0].id)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with (
        ours,
        theirs,
        _debugger(ours, owner, processes),
        _command(theirs, owner, module, words, processes[0].id) as command,
    ):
        ours.close()
        theirs.close()
        with _passing_signals_on(command):
            _show(command)
            status = command.wait()
    return status if status >= 0 else 128 - status


def _share_fate(process_id: int) -> None:
    """Be killed no later than the process where memory runs out; what this command starts inherits it.

    Here, since a process that changes its user cannot write it before its new program starts.
    """
    ours, theirs = (Path(f"/proc/{each}/oom_score_adj") for each in ("self", process_id))
    ours.write_text(str(max(0, int(ours.read_text()), int(theirs.read_text()))))


@contextlib.contextmanager
def _debugger(connection: socket.socket, owner: Owner, processes: Sequence[Process]) -> Iterator[None]:
    """Start root's other part. It ends when the owner's processes have; this one's end limits its time."""
    known = [f"{process.id}:{process.started}" for process in processes]
    words = [str(connection.fileno()), str(owner.user), str(owner.group), *known]
    debugger = subprocess.Popen(
        isolated.python("sgl_aspects.attach.debugging", *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[connection.fileno()],
        cwd="/",
        start_new_session=True,
    )
    try:
        yield
    finally:
        assert debugger.stdin is not None
        debugger.stdin.close()
        debugger.returncode = 0  # not waited for: a guard may still need it


def _command(
    connection: socket.socket, owner: Owner, module: str, words: Sequence[str], process_id: int
) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def drop() -> None:
        _drop_privileges(owner, parent)
        _drop_limits(process_id)

    try:
        return subprocess.Popen(
            isolated.python(module, str(connection.fileno()), *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[connection.fileno()],
            cwd="/",
            env=_environment(owner, os.environ),
            user=owner.user,
            group=owner.group,
            extra_groups=owner.groups,
            umask=0o077,
            start_new_session=True,
            preexec_fn=drop,  # this command has no threads
        )
    except (OSError, subprocess.SubprocessError) as error:
        package = Path(sgl_aspects.__file__).parent
        raise AttachError(
            f"the command cannot go on as user {owner.user}, whose process it is ({error}): that user must "
            f"be able to run {sys.executable} and to read {package}; install sgl-aspects where every user "
            "can, such as below /opt"
        ) from error


def _drop_privileges(owner: Owner, parent: int) -> None:
    """Give up what a change of the user leaves, and check that change, before the new program starts."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    if library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or library.prctl(_PARENT_DEATH_SIGNAL, signal.SIGINT):
        raise OSError(ctypes.get_errno(), "prctl")
    if _KEYCTL is not None:
        library.syscall(_KEYCTL, _JOIN_SESSION, 0)  # root's keys; a kernel or container without them refuses
        library.syscall(_IO_PRIORITY, _THIS_PROCESS, 0, 0)
    status = dict(line.split(":", 1) for line in Path("/proc/thread-self/status").read_text().splitlines())
    is_owner = (
        os.getresuid() == (owner.user,) * 3
        and os.getresgid() == (owner.group,) * 3
        and set(os.getgroups()) <= {owner.group, *owner.groups}
        and not any(int(status[name], 16) for name in ("CapPrm", "CapEff", "CapAmb"))
    )
    with contextlib.suppress(PermissionError):
        os.setresuid(0, 0, 0)
        is_owner = False
    if not is_owner or os.getppid() != parent:
        raise PermissionError("root's rights are not given up")
    with open(sgl_aspects.__file__, "rb"):
        pass  # a package that cannot be read is reported by the parent


def _drop_limits(process_id: int) -> None:
    """Take over the process's limits on resources where they are lower, and give up root's priority."""
    for kind in {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}:
        soft, hard = resource.getrlimit(kind)
        hard = min(hard, resource.prlimit(process_id, kind)[1], key=_size)
        resource.setrlimit(kind, (min(soft, hard, key=_size), hard))
    os.setpriority(os.PRIO_PROCESS, 0, max(0, os.getpriority(os.PRIO_PROCESS, 0)))
    if os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _size(limit: int) -> float:
    return float("inf") if limit == resource.RLIM_INFINITY else limit


def _environment(owner: Owner, ours: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say what to record and where to send it, and the owner's own."""
    kept = {name: value for name, value in ours.items() if is_for_collector(name) or name.startswith(_KEPT)}
    try:
        entry = pwd.getpwuid(owner.user)
    except KeyError:
        return {**kept, "PATH": _PATH, "HOME": "/"}
    return {**kept, "PATH": _PATH, "HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}


@contextlib.contextmanager
def _passing_signals_on(command: subprocess.Popen[bytes]) -> Iterator[None]:
    before = {
        number: signal.signal(number, lambda *_: command.send_signal(signal.SIGINT))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(command: subprocess.Popen[bytes]) -> None:
    """Print what the command prints, without what would act on a terminal, until it has ended."""
    assert command.stdout is not None
    assert command.stderr is not None
    shown: list[tuple[IO[bytes], TextIO]] = [(command.stdout, sys.stdout), (command.stderr, sys.stderr)]
    with selectors.DefaultSelector() as selector:
        for source, target in shown:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            selector.register(source, selectors.EVENT_READ, (decoder, target))
        while selector.get_map():
            ready = selector.select(_LOOK_SECONDS)
            if not ready and command.poll() is not None:
                return  # what it has started goes on and holds the pipes
            for key, _ in ready:
                data = os.read(key.fd, _READ_BYTES)
                decoder, target = key.data
                print(printable(decoder.decode(data, final=not data)), end="", file=target, flush=True)
                if not data:
                    selector.unregister(key.fileobj)
