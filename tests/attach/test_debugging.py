"""Root's debugger, and what the part of another user's command, which that user controls, may ask of it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects import isolated
from sgl_aspects.attach.rights import process_folder, started
from tests.support.other_user import NOBODY, require_two_users, run_as_nobody
from tests.support.processes import wait_until

pytestmark = [pytest.mark.attach, pytest.mark.usefixtures("ptrace")]

SECONDS = 60
MEMORY = (
    "import ctypes, time; held = ctypes.create_string_buffer(b'theirs'); "
    "print(ctypes.addressof(held), flush=True); time.sleep(600)"
)
SECRET = ctypes.create_string_buffer(b"of root's")


@dataclass
class Debugger:
    """Root's debugger for one process of another user, and the socket that the user's part has."""

    process: subprocess.Popen[bytes]
    asks: socket.socket
    target: int
    address: int

    def ask(self, **values: Any) -> dict[str, Any]:
        self.asks.send(json.dumps({"name": "one", **values}).encode())
        answer: dict[str, Any] = json.loads(self.asks.recv(1 << 20))
        return answer

    def read(self, process: int, address: int) -> dict[str, Any]:
        return self.ask(operation="read", process=process, address=address, size=6)


@contextlib.contextmanager
def debugging(target: int, start: int, address: int = 0) -> Iterator[Debugger]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    words = [str(theirs.fileno()), str(NOBODY), str(NOBODY), f"{target}:{start}"]
    with ours, theirs:
        ours.settimeout(SECONDS)
        process = subprocess.Popen(
            isolated.python("sgl_aspects.attach.debugging", *words),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        try:
            yield Debugger(process, ours, target, address)
        finally:
            ours.close()
            process.communicate(timeout=SECONDS)  # it ends with the other end of its socket


@pytest.fixture
def target() -> Iterator[tuple[int, int, int]]:
    """A process of another user: its id, its start time, and the address of a text in it."""
    interpreter = require_two_users()
    with run_as_nobody([interpreter, "-I", "-c", MEMORY], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            address = int(process.stdout.readline())
            with process_folder(process.pid) as folder:
                start = started(folder)
            yield process.pid, start, address
        finally:
            process.kill()


@pytest.fixture
def debugger(target: tuple[int, int, int]) -> Iterator[Debugger]:
    with debugging(*target) as found:
        yield found


def test_the_memory_of_its_own_process_is_read(debugger: Debugger) -> None:
    assert debugger.read(debugger.target, debugger.address)["value"] == b"theirs".hex()


HERE = {"address": ctypes.addressof(SECRET)}
OPERATIONS: dict[str, dict[str, Any]] = {
    "read": {**HERE, "size": 6},
    "write": {**HERE, "data": "00", "code": [0, 0]},
    "call": {"calls": [[1, 0]], "stub_at": 4096, "wait": None},
    "wait_of": {},
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_other_process_is_touched(operation: str, debugger: Debugger) -> None:
    for process in (os.getpid(), debugger.process.pid, os.getppid(), 1):
        answer = debugger.ask(operation=operation, process=process, **OPERATIONS[operation])
        assert answer.keys() & {"value", "refused", "number"} <= {"refused", "number"}, answer
    assert SECRET.value == b"of root's"
    assert "value" in debugger.read(debugger.target, debugger.address)  # and it goes on


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nor_one_that_has_the_id_of_a_process_that_has_ended(
    operation: str, target: tuple[int, int, int]
) -> None:
    process, start, _ = target
    with debugging(process, start - 1) as debugger:
        answer = debugger.ask(operation=operation, process=process, **OPERATIONS[operation])
        assert "is not one of those" in answer["refused"]


def _read(**values: Any) -> bytes:
    return _request(**{"operation": "read", "address": 4096, "size": 1, **values})


def _call(**values: Any) -> bytes:
    return _request(**{"operation": "call", "calls": [], "stub_at": 4096, "wait": None, **values})


def _write(**values: Any) -> bytes:
    return _request(**{"operation": "write", "address": 4096, "data": "00", "code": [0, 0], **values})


def _request(**values: Any) -> bytes:
    return json.dumps({"name": "one", "process": "TARGET", **values}).encode()


HOSTILE = {
    "not JSON": b"\xff{",
    "a list": b"[]",
    "a number": b"7",
    "nothing in it": b"{}",
    "deeply nested": b"[" * 100_000,
    "a long number": b'{"process": ' + b"9" * 100_000 + b"}",
    "infinity": _read(process=float("inf")),
    "an operation that there is not": _read(operation="answer"),
    "an operation that is a list": _read(operation=[]),
    "a name of the class": _read(operation="__class__"),
    "a negative address": _read(address=-1),
    "an address beyond the memory": _read(address=2**64),
    "an address that is a text": _read(address="4096"),
    "a value that there is not": _read(check=1),
    "too large a piece": _read(size=1 << 30),
    "data that are not hexadecimal": _write(data="zz"),
    "half a range": _write(code=[0]),
    "a call of a text": _call(calls=[["system", 0]]),
    "a call of nothing": _call(calls=[[]]),
    "calls that are a number": _call(calls=7),
    "half a wait": _call(wait=[1, 2]),
    "a wait of texts": _call(wait=["a", "b", "c", "d"]),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_not_a_request_ends_it_and_leaves_the_process_running(what: str, debugger: Debugger) -> None:
    debugger.asks.send(HOSTILE[what].replace(b'"TARGET"', str(debugger.target).encode()))
    assert debugger.process.wait(SECONDS) == 1
    assert debugger.process.stderr is not None
    assert debugger.process.stderr.read() == b""
    state = Path(f"/proc/{debugger.target}/status").read_text()
    assert "TracerPid:\t0\n" in state
    assert "State:\tS" in state


def test_a_part_that_reads_no_answers_does_not_hold_it_up(debugger: Debugger) -> None:
    debugger.asks.setblocking(False)
    request = _read(address=debugger.address, size=60_000).replace(b'"TARGET"', str(debugger.target).encode())

    def has_ended() -> bool:
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                debugger.asks.send(request)
        return debugger.process.poll() is not None

    wait_until(has_ended)
    assert debugger.process.returncode == 1


def test_it_ends_with_the_other_part(target: tuple[int, int, int]) -> None:
    with debugging(*target) as debugger:
        pass
    assert debugger.process.returncode == 0
