"""Processes that tests start: waiting for them, looking at them, ending them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol


def free_port() -> int:
    """Return a free port, outside the range from which the system takes ports for clients and for port 0."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def alone_on_this_machine() -> Iterator[None]:
    """Keep other runs of these tests, also of other users, out of what the machine has once."""
    descriptor = os.open("/dev/shm", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Program(Protocol):
    """Methods of a process that tests have started, a `subprocess.Popen` or another."""

    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def end(process: Program) -> None:
    """Terminate the process, after 20 seconds kill it, and wait for its end."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll until ``condition`` holds; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        time.sleep(0.01)


def is_running(process_id: int) -> bool:
    """Return whether the process runs; False for a zombie, too."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(process_id: int) -> None:
    wait_until(lambda: not is_running(process_id))


def peak_megabytes(process_id: int | None) -> int:
    """Return the peak of its resident memory."""
    status = Path(f"/proc/{process_id}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) // 1024


def finished(
    *words: str | Path,
    cwd: str | Path | None = None,
    seconds: float = 240,
    without: tuple[str, ...] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Variables whose names begin with one of ``without`` are not handed on."""
    environment |= variables
    kept = {name: text for name, text in os.environ.items() if not name.startswith(without)}
    return subprocess.run(
        words, cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def python(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """``finished`` with this interpreter."""
    return finished(sys.executable, *words, **options)


def command(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """``finished`` with ``sgl-aspects``."""
    return python("-m", "sgl_aspects", *words, **options)


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """What a command wrote that refused, on one line."""
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    return done.stderr


def output_of(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command has printed; fails with its errors if it did not end with status 0."""
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def without_room(errors: str) -> str:
    """Leave out the lines on a /dev/shm with little room, which is the machine's."""
    return re.sub(r"(?m)^tracing has room for .*\n", "", errors)


def has_little_shared_memory() -> bool:
    """Return whether rings are shorter here than they should be, so that a burst may not fit."""
    system = os.statvfs("/dev/shm")
    return system.f_blocks * system.f_frsize < 256 << 20
