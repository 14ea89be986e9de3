"""Detaches from an engine when the command that attached to it is gone, however it ended.

    python -m sgl_aspects.attach.guard RUN_FOLDER [SOCKET]

``SOCKET`` is the number of the one that leads to root's debugger, if any. Standard input is a pipe from the
command: data means that it detached, a bare end of file that it died.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from sgl_aspects.attach.debugging import use_debugger
from sgl_aspects.attach.operation import Run

FAREWELL = b"detached"


def main(arguments: list[str]) -> int:
    """Wait for the end of the command; detach unless it reported that it did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if arguments[1:]:
        use_debugger(int(arguments[1]))
    if sys.stdin.buffer.read() == FAREWELL:
        return 0
    Run(Path(arguments[0])).abandon()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
