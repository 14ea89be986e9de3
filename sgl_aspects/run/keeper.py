"""A small program that starts a run's collector, and starts it again once where it was killed.

    python keeper.py REPORT_FD MARK COMMAND [ARGUMENT ...]

Neither it nor the collector is a descendant of the engine, which may kill its descendants when it ends. It
imports nothing of this package, waits, and ends with the collector. The collector's process id is the first
line written to ``REPORT_FD``. ``MARK`` is a file in the run folder, made at a restart.
"""

from __future__ import annotations

import os
import signal
import sys

_RESTARTS = 1


def main(report: int, mark: str, command: list[str]) -> None:
    # until the collector can be stopped by a signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where the engine ignores it, no end is told
    process_id = _start(command)
    os.write(report, b"%d\n" % process_id)
    for left in reversed(range(_RESTARTS + 1)):
        _, status = os.waitpid(process_id, 0)
        if not os.WIFSIGNALED(status) or not os.path.isdir(os.path.dirname(mark)):
            return
        killed = f"process {process_id} was killed (signal {os.WTERMSIG(status)})"
        if not left:
            by_hand = f"cd / && {sys.executable} -m {' '.join(command[-3:-1])}"
            _tell(f"{killed} again; to start it by hand: {by_hand}")
            return
        os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
        process_id = _start(command)
        _tell(f"{killed}: process {process_id} goes on with what is still in the rings")


def _start(command: list[str]) -> int:
    process_id = os.fork()
    if not process_id:
        os.setsid()  # Linux ranks sessions, and the collector lowers its own
        os.execv(command[0], command)
    return process_id


def _tell(text: str) -> None:
    try:
        os.write(2, f"sgl-aspects collector: {text}\n".encode())
    except OSError:
        return  # the reader is gone


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
