"""Prepares a process to be asked: a control block, and a signal that makes its main thread look there.

From the standard library alone, and with no thread that waits: below `sgl-aspects run --dormant` it is loaded
by its file at the start of every interpreter, where nothing else of sgl-aspects is imported. The control
block is a file that only this user may open, locked for as long as the process lives. A command writes the
path of a script into it and sends the signal, which an idle process takes as well (:mod:`.requests`).
"""

import _thread
import atexit
import contextlib
import fcntl
import os
import signal
import stat
import sys
import threading

SWITCH = "ASPECTS_DORMANT"
#: Ends the name of the file that says why a script could not be run.
FAILED = ".failed"
_LONGEST = 4096
_NAMESPACE = "/proc/self/ns/pid"

# Control blocks by their folders, with their files.
_blocks: "dict[str, tuple[int, os.stat_result]]" = {}


def signal_number() -> int:
    return signal.SIGRTMIN + 7


def folder_of(user: int) -> str:
    """Return the folder of the control blocks of a user's prepared processes."""
    return f"/dev/shm/sgl-aspects-prepared-{user}"


def block_prefix() -> str:
    """Return how names of control blocks begin in this PID namespace; the process's id follows.

    Containers may share the folder: elsewhere that id is another process's, which the signal would end.
    """
    try:
        return f"{os.stat(_NAMESPACE).st_ino}-"
    except OSError:  # a system without namespaces
        return "0-"


def prepare(folder: str = "") -> None:
    """Make this process's control block in a folder, by default the user's, and handle the signal.

    :raises OSError: that is not possible: the folder is another user's, or this is not the main thread.
    """
    folder = folder or folder_of(os.geteuid())
    if folder in _blocks:
        return
    os.makedirs(folder, 0o700, exist_ok=True)
    status = os.lstat(folder)
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        # What another user writes there must not be run.
        mode = stat.filemode(status.st_mode)
        raise OSError(
            f"{folder} belongs to user {status.st_uid}, with mode {mode}; remove it, or name another"
        )
    try:
        signal.signal(signal_number(), _on_signal)
    except (ValueError, AttributeError) as error:  # a system without such signals
        raise OSError(str(error)) from error
    path = os.path.join(folder, block_prefix() + str(os.getpid()))
    block = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    fcntl.flock(block, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _blocks[folder] = block, os.fstat(block)


def prepare_or_say(folder: str = "") -> None:
    """Do the same; one line on standard error says why that is not possible."""
    try:
        prepare(folder)
    except OSError as error:
        text = f"process {os.getpid()} is not prepared for requests of sgl-aspects: {error}"
        if sys.stderr is not None:
            with contextlib.suppress(OSError):
                print(f"sgl-aspects: {text}", file=sys.stderr, flush=True)


def _on_signal(number: int, frame: object) -> None:
    """Run the requested script in a thread, which ends; called between two bytecodes of the main thread."""
    for block in _open_blocks():
        path = os.fsdecode(os.pread(block, _LONGEST, 0))
        os.ftruncate(block, 0)
        if path:
            try:
                _thread.start_new_thread(_run, (path,))
            except RuntimeError as error:  # it would end the process, which may start no more threads
                _fail(path, error)


def _open_blocks() -> "list[int]":
    """Return the blocks that are open: where the program closed all files, others have their numbers."""
    found = []
    for block, status in _blocks.values():
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(block), status):
                found.append(block)
    return found


def _run(path: str) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            source = file.read()
    except OSError:
        return  # the command has ended meanwhile
    try:
        exec(compile(source, path, "exec"), {"__name__": "sgl_aspects_request"})
    except BaseException as error:  # noqa: BLE001 - whatever it is, the process must not see it
        _fail(path, error)


def _fail(path: str, error: BaseException) -> None:
    with contextlib.suppress(OSError), open(path + FAILED, "w", encoding="utf-8") as file:
        file.write(f"{type(error).__name__}: {error}")


@atexit.register
def _at_exit() -> None:
    """Ignore the signal from here on: the interpreter restores its default, which would end the process."""
    if _blocks:
        signal.signal(signal_number(), signal.SIG_IGN)


def _in_child() -> None:
    """Make control blocks for a forked child; the locks on its parent's stay with the parent."""
    folders = list(_blocks)
    for block in _open_blocks():
        os.close(block)
    _blocks.clear()
    if threading.current_thread() is threading.main_thread():
        for folder in folders:
            prepare_or_say(folder)


os.register_at_fork(after_in_child=_in_child)
