"""Operations on another process's memory and registers, by this process or by one of root's on request.

Root attaches to another user's process in two processes. One runs as that user and does all the work. The
other one, the debugger, stays root's and does the four operations below for it, on the processes of that
engine alone. Requests are untrusted data. The operations let the user do nothing that the user's own debugger
could not do: each is refused unless the process has no more rights than its user (:mod:`.rights`).

    python -m sgl_aspects.attach.debugging SOCKET USER GROUP PID:START ...

Its standard input is a pipe from root's command: it ends some time after that has ended, for the guard.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sgl_aspects.attach import ptrace
from sgl_aspects.attach.ptrace import Call, Check, Wait
from sgl_aspects.attach.rights import Owner, process_folder, started
from sgl_aspects.errors import AttachError

_LONGEST = 64 << 10
_ANSWER_SECONDS = 60.0
# A guard may need as long to detach from every process of a busy machine.
_GUARD_SECONDS = 600.0

_connection: socket.socket | None = None
_numbers = itertools.count(1)


def read(process_id: int, address: int, size: int) -> bytes:
    """Read memory, at most 64 KiB."""
    return bytes.fromhex(_do("read", process_id, address=address, size=size))


def write(process_id: int, address: int, data: bytes, *, code: range = range(0)) -> bool:
    """Write memory, as :func:`.ptrace.write_memory`."""
    where = [code.start, code.stop]
    return bool(_do("write", process_id, address=address, data=data.hex(), code=where))


def call(process_id: int, calls: Sequence[Call], stub_at: int, *, wait: Wait | None = None) -> float | None:
    """Make the main thread call functions, as :func:`.ptrace.call_in_main_thread`."""
    seconds: float | None = _do("call", process_id, calls=calls, stub_at=stub_at, wait=wait)
    return seconds


def wait_of(process_id: int) -> Wait | None:
    """Return the wait of the main thread, as :meth:`.ptrace.Wait.of`."""
    found = _do("wait_of", process_id)
    return None if found is None else Wait(*found)


def connection() -> socket.socket | None:
    """Return the connection to root's debugger, in a process that works for root as another user."""
    return _connection


def use_debugger(descriptor: int) -> None:
    """Debug through root's debugger from now on, at the other end of the socket ``descriptor``."""
    global _connection
    os.set_inheritable(descriptor, False)
    _connection = socket.socket(fileno=descriptor)
    _connection.settimeout(_ANSWER_SECONDS)


def _do(operation: str, process_id: int, **values: object) -> Any:
    if _connection is None:
        return _OPERATIONS[operation](process_id, ptrace.accept, **values)
    # The guard uses the same connection, after a command that may not have read its last answer.
    name = f"{os.getpid()}-{next(_numbers)}"
    request = {"name": name, "operation": operation, "process": process_id, **values}
    try:
        _connection.send(json.dumps(request).encode())
        answer: dict[str, Any] = {}
        while answer.get("name") != name:
            answer = json.loads(_connection.recv(4 * _LONGEST) or b"{}") or {"name": name}
    except OSError as error:
        raise AttachError(f"root's part of the command does not answer ({error})") from error
    if "number" in answer:
        raise OSError(answer["number"], os.strerror(answer["number"]))
    if "value" not in answer:
        raise AttachError(answer.get("refused", "root's part of the command has ended"))
    return answer["value"]


# -- the operations, with values as in a request: ValueError and TypeError if they are none ----------------


def _read(process_id: int, check: Check, *, address: object, size: object) -> str:
    data = ptrace.read_memory(process_id, _number(address), _number(size, _LONGEST), check=check)
    return data.hex()


def _write(process_id: int, check: Check, *, address: object, data: str, code: Sequence[object]) -> bool:
    start, stop = map(_number, code)
    where = range(start, stop)
    return ptrace.write_memory(process_id, _number(address), bytes.fromhex(data), code=where, check=check)


def _call(
    process_id: int,
    check: Check,
    *,
    calls: Sequence[Sequence[object]],
    stub_at: object,
    wait: Sequence[object] | None,
) -> float | None:
    wanted = [
        (_number(function), *(_number(each, least=ptrace.FIRST_RESULT) for each in values[:2]))
        for function, *values in calls[:3]
    ]
    in_wait = None
    if wait is not None:
        number, stack, instruction, switches = wait
        in_wait = Wait(_number(number), _number(stack), _number(instruction), str(switches))
    return ptrace.call_in_main_thread(process_id, wanted, _number(stub_at), wait=in_wait, check=check)


def _wait_of(process_id: int, check: Check) -> Wait | None:
    with process_folder(process_id) as folder:
        found = Wait.of(process_id)
        check(process_id, folder)
    return found


_OPERATIONS: dict[str, Callable[..., object]] = {
    "read": _read,
    "write": _write,
    "call": _call,
    "wait_of": _wait_of,
}


def _number(value: object, most: int = 2**64 - 1, *, least: int = 0) -> int:
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError("not an address")
    return value


# -- root's part -------------------------------------------------------------------------------------------


def _answer(request: bytes, check: Check) -> dict[str, Any]:
    """Do what is requested, or answer with the reason why not. Raises ``ValueError``: it is not a request."""
    try:
        asked = json.loads(request)
        name, process_id = str(asked.pop("name")), int(asked.pop("process"))
        operation = _OPERATIONS[asked.pop("operation")]
        try:
            with process_folder(process_id) as folder:
                check(process_id, folder)  # before anything is stopped; the operation checks again
            return {"name": name, "value": operation(process_id, check, **asked)}
        except AttachError as error:
            return {"name": name, "refused": str(error)}
        except OSError as error:
            return {"name": name, "number": error.errno}
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError("not a request") from error


def _check(owner: Owner, known: dict[int, int], process_id: int, folder: Path) -> None:
    """Accept processes of one user alone, of which ``known`` has the ids and start times."""
    if known.get(process_id) != started(folder):
        raise AttachError(f"process {process_id} is not one of those that the command was started for")
    owner.require(process_id, folder)


def main(arguments: Sequence[str]) -> int:
    """Answer requests until the other end is closed, or root's command ended some time ago."""
    descriptor, user, group, *processes = arguments
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the command that it works for
    known = {int(process): int(start) for process, start in (each.split(":") for each in processes)}
    check = partial(_check, Owner(int(user), int(group), ()), known)
    with socket.socket(fileno=int(descriptor)) as asked:
        watched: list[Any] = [asked, sys.stdin]
        deadline = float("inf")
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select(watched, [], [], None if left == float("inf") else left)
            if sys.stdin in ready:
                watched.remove(sys.stdin)
                deadline = time.monotonic() + _GUARD_SECONDS
            if asked in ready:
                try:
                    if not (request := asked.recv(4 * _LONGEST)):
                        return 0
                    asked.send(json.dumps(_answer(request, check)).encode(), socket.MSG_DONTWAIT)
                except (OSError, ValueError):
                    return 1  # not what our other part sends
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
