"""Operations on another process's memory and registers, by this process or by one of root's on request.

Root attaches to another user's process in two processes. One runs as that user and does all the work. The
other one, the debugger, stays root's and does the four operations of :class:`Debugger` for it, on the
processes of that engine alone. Requests are untrusted data. The operations let the user do nothing that the
user's own debugger could not do: each is refused unless the process has no more rights than its user
(:mod:`owner`).

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from sgl_aspects.attach import ptrace
from sgl_aspects.attach.owner import Owner, process_folder, started
from sgl_aspects.attach.ptrace import Call, Wait
from sgl_aspects.errors import AttachError

_LONGEST = 64 << 10
_ANSWER_SECONDS = 60.0
# A guard may need as long to detach from every process of a busy machine.
_GUARD_SECONDS = 600.0


class Debugger(Protocol):
    """The operations, as in :mod:`ptrace`."""

    def read(self, process_id: int, address: int, size: int) -> bytes: ...
    def write(self, process_id: int, address: int, data: bytes, *, code: range = range(0)) -> bool: ...
    def call(
        self, process_id: int, calls: Sequence[Call], stub_at: int, *, wait: Wait | None = None
    ) -> float | None: ...
    def wait_of(self, process_id: int) -> Wait | None: ...


class _Own:
    """This process's own right to debug another one."""

    def read(self, process_id: int, address: int, size: int) -> bytes:
        return ptrace.read_memory(process_id, address, size)

    def write(self, process_id: int, address: int, data: bytes, *, code: range = range(0)) -> bool:
        return ptrace.write_memory(process_id, address, data, code=code)

    def call(
        self, process_id: int, calls: Sequence[Call], stub_at: int, *, wait: Wait | None = None
    ) -> float | None:
        return ptrace.call_in_main_thread(process_id, calls, stub_at, wait=wait)

    def wait_of(self, process_id: int) -> Wait | None:
        return Wait.of(process_id)


class _Asked:
    """Requests to the debugger at the other end of ``connection``."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(_ANSWER_SECONDS)
        self._numbers = itertools.count(1)

    def read(self, process_id: int, address: int, size: int) -> bytes:
        return bytes.fromhex(self._ask("read", process_id, address=address, size=size))

    def write(self, process_id: int, address: int, data: bytes, *, code: range = range(0)) -> bool:
        where = [code.start, code.stop]
        return bool(self._ask("write", process_id, address=address, data=data.hex(), code=where))

    def call(
        self, process_id: int, calls: Sequence[Call], stub_at: int, *, wait: Wait | None = None
    ) -> float | None:
        stood = self._ask("call", process_id, calls=calls, stub_at=stub_at, wait=wait)
        return None if stood is None else float(stood)

    def wait_of(self, process_id: int) -> Wait | None:
        found = self._ask("wait_of", process_id)
        return None if found is None else Wait(*found)

    def _ask(self, operation: str, process_id: int, **values: object) -> Any:
        # The guard uses the same connection, after a command that may not have read its last answer.
        name = f"{os.getpid()}-{next(self._numbers)}"
        request = {"name": name, "operation": operation, "process": process_id, **values}
        try:
            self.connection.send(json.dumps(request).encode())
            answer: dict[str, Any] = {}
            while answer.get("name") != name:
                answer = json.loads(self.connection.recv(4 * _LONGEST) or b"{}") or {"name": name}
        except OSError as error:
            raise AttachError(f"root's part of the command does not answer ({error})") from error
        if "number" in answer:
            raise OSError(answer["number"], os.strerror(answer["number"]))
        if "value" not in answer:
            raise AttachError(answer.get("refused", "root's part of the command has ended"))
        return answer["value"]


_debugger: Debugger = _Own()


def debugger() -> Debugger:
    """Return what this process debugs others with."""
    return _debugger


def connection() -> socket.socket | None:
    """Return the connection to root's debugger, in a process that works for root as another user."""
    return _debugger.connection if isinstance(_debugger, _Asked) else None


def use_debugger(descriptor: int) -> None:
    """Debug through root's debugger from now on, at the other end of the socket ``descriptor``."""
    global _debugger
    os.set_inheritable(descriptor, False)
    _debugger = _Asked(socket.socket(fileno=descriptor))


# -- root's part -------------------------------------------------------------------------------------------


class _Allowed:
    """Does operations on processes of one user, of which ``processes`` has the ids and start times."""

    def __init__(self, owner: Owner, processes: Mapping[int, int]) -> None:
        self._owner = owner
        self._processes = processes
        self._operations: dict[str, Callable[[int, Mapping[str, Any]], object]] = {
            "read": self._read,
            "write": self._write,
            "call": self._call,
            "wait_of": self._wait_of,
        }

    def answer(self, request: bytes) -> dict[str, Any]:
        """Do what is requested, or answer with the reason why not.

        Raises ``ValueError`` for what is not a request.
        """
        try:
            asked = json.loads(request)
            name, process_id = str(asked["name"]), int(asked["process"])
            operation = self._operations[asked["operation"]]
        except (KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError("not a request") from error
        try:
            return {"name": name, "value": operation(process_id, asked)}
        except AttachError as error:
            return {"name": name, "refused": str(error)}
        except (KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError("not a request") from error
        except OSError as error:
            return {"name": name, "number": error.errno}

    def _check(self, process_id: int, folder: int) -> None:
        if self._processes.get(process_id) != started(folder):
            raise AttachError(f"process {process_id} is not one of those that the command was started for")
        self._owner.require(process_id, folder)

    def _read(self, process_id: int, asked: Mapping[str, Any]) -> str:
        size = _number(asked["size"], _LONGEST)
        return ptrace.read_memory(process_id, _number(asked["address"]), size, check=self._check).hex()

    def _write(self, process_id: int, asked: Mapping[str, Any]) -> bool:
        start, stop = map(_number, asked["code"])
        data = bytes.fromhex(asked["data"])
        self._check_first(process_id)
        return ptrace.write_memory(
            process_id, _number(asked["address"]), data, code=range(start, stop), check=self._check
        )

    def _call(self, process_id: int, asked: Mapping[str, Any]) -> float | None:
        calls = [
            (_number(function), *(_number(each, least=ptrace.FIRST_RESULT) for each in values[:2]))
            for function, *values in asked["calls"][:3]
        ]
        wait = None
        if asked["wait"] is not None:
            number, stack, instruction, switches = asked["wait"]
            wait = Wait(_number(number), _number(stack), _number(instruction), str(switches))
        self._check_first(process_id)
        return ptrace.call_in_main_thread(
            process_id, calls, _number(asked["stub_at"]), wait=wait, check=self._check
        )

    def _wait_of(self, process_id: int, asked: Mapping[str, Any]) -> Wait | None:
        with process_folder(process_id) as folder:
            found = Wait.of(process_id)
            self._check(process_id, folder)
        return found

    def _check_first(self, process_id: int) -> None:
        """Refuse before anything is stopped what would be refused once it is."""
        with process_folder(process_id) as folder:
            self._check(process_id, folder)


def _number(value: object, most: int = 2**64 - 1, *, least: int = 0) -> int:
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError("not an address")
    return value


def main(arguments: Sequence[str]) -> int:
    """Answer requests until the other end is closed, or root's command ended some time ago."""
    descriptor, user, group, *processes = arguments
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with the command that it works for
    known = [tuple(map(int, each.split(":"))) for each in processes]
    allowed = _Allowed(Owner(int(user), int(group), ()), dict(known))  # type: ignore[arg-type]
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
                    asked.send(json.dumps(allowed.answer(request)).encode(), socket.MSG_DONTWAIT)
                except (OSError, ValueError):
                    return 1  # not what our other part sends
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
