"""What tests that start processes need."""

from __future__ import annotations

import socket
import subprocess
from typing import Any


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def end(process: subprocess.Popen[Any]) -> None:
    """By asking it first; it is gone afterwards."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
