"""Prepares a process for attaching without ptrace: a control block, and a signal that triggers reading it.

Runs at the start of every interpreter below `sgl-aspects run --dormant`, from the standard library alone: no
hook is woven, nothing of sgl-aspects is imported, no thread is started. The control block is a file that only
this user may open, locked for as long as the process lives; `sgl-aspects attach` writes the script to run
into it.
"""

import _thread
import contextlib
import fcntl
import os
import signal
import sys
import threading

SWITCH = "ASPECTS_DORMANT"
SIGNAL = signal.SIGRTMIN + 7
_LONGEST = 4096

_control = -1


def folder_of(user: int) -> str:
    """Return the folder of the control blocks of a user's prepared processes."""
    return f"/dev/shm/sgl-aspects-prepared-{user}"


def prepare() -> None:
    """Make this process's control block, and install the signal handler. In the main thread."""
    global _control
    folder = folder_of(os.geteuid())
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & 0o777 != 0o700:
        # What another user writes there must not be run.
        print(
            f"sgl-aspects: process {os.getpid()} is not prepared for sgl-aspects attach: {folder} belongs to "
            f"user {status.st_uid}, with mode {status.st_mode & 0o777:o}; remove it and start again",
            file=sys.stderr,
            flush=True,
        )
        return
    _remove_dead(folder)
    path = os.path.join(folder, str(os.getpid()))
    _control = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    fcntl.flock(_control, fcntl.LOCK_EX | fcntl.LOCK_NB)
    signal.signal(SIGNAL, _on_signal)


def _remove_dead(folder: str) -> None:
    for name in os.listdir(folder):
        if not os.path.exists(f"/proc/{name}"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))


def _on_signal(number: int, frame: object) -> None:
    """Run the requested script in a thread, which ends; called between two bytecodes of the main thread."""
    path = os.pread(_control, _LONGEST, 0).decode()
    os.ftruncate(_control, 0)
    if path:
        _thread.start_new_thread(_run, (path,))


def _run(path: str) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            source = file.read()
    except OSError:
        return  # the run has ended meanwhile
    exec(compile(source, path, "exec"), {"__name__": "sgl_aspects_attach"})


def _in_child() -> None:
    """Make a control block for a forked child; the lock on its parent's stays with the parent."""
    global _control
    if _control >= 0:
        os.close(_control)
        _control = -1
        if threading.current_thread() is threading.main_thread():
            with contextlib.suppress(OSError):
                prepare()


os.register_at_fork(after_in_child=_in_child)
