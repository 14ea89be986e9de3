"""Makes the main thread of another process call a function once, with a single write of its registers.

The thread is stopped for well under a millisecond. A few instructions are written behind the code of some
library, into unused bytes of its last page; then the thread's instruction pointer is set to them. They save
every register, call the function, restore the registers and jump back. From that write on the thread runs
alone: the writer may be killed at any moment, and before it nothing has changed.

x86-64 Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from sgl_aspects.attach.rights import process_folder
from sgl_aspects.errors import AttachError

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_GET_REGISTERS, _SET_REGISTERS = 12, 13
_ALL_THREADS = 0x40000000
_STOP_SECONDS = 5.0
_EVENT_SHIFT = 16

# user_regs_struct: 27 words.
_REGISTERS = struct.Struct("<27Q")
_RAX, _ORIG_RAX, _RIP, _RSP = 10, 15, 16, 19
_REGISTER_SPACE = 1 << 64
# The called function returns at once, so its caller is near the top of the stack; 16 KiB of it are registers.
_STACK_BYTES = 64 << 10
_NO_SYSCALL = _REGISTER_SPACE - 1
_EINTR = 4
_RESTART, _RESTART_BLOCK = (512, 513, 514), 516
# The system call of glibc's contended mutexes: futex, FUTEX_WAIT, private to this process.
_MUTEX_WAIT = ("202", "0x80", "0x2")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long

#: A call in the other process: the function's address, and its arguments (at most two).
Call = tuple[int, ...]
#: Raises ``AttachError`` for a process that must be left alone: its id, and its folder below ``/proc``.
Check = Callable[[int, Path], None]
#: A placeholder for an argument: the result of the first call.
FIRST_RESULT = -1


class Wait(NamedTuple):
    """A wait of the main thread: system call, stack pointer, instruction, and number of waits so far."""

    number: int
    stack: int
    instruction: int
    switches: str

    @classmethod
    def of(cls, process_id: int) -> Wait | None:
        """Return None while the main thread runs, or waits for a mutex: it may hold others then."""
        words = Path(f"/proc/{process_id}/syscall").read_text().split()
        if words[0] in ("running", "-1") or (words[0], *words[2:4]) == _MUTEX_WAIT:
            return None
        status = Path(f"/proc/{process_id}/task/{process_id}/status").read_text(errors="replace")
        switches = status[status.index("voluntary_ctxt_switches") :]
        return cls(int(words[0]), int(words[-2], 16), int(words[-1], 16), switches)

    def goes_on(self, registers: Sequence[int]) -> bool:
        """Return whether the stopped main thread was interrupted in it."""
        result = registers[_RAX] - _REGISTER_SPACE
        place = registers[_ORIG_RAX], registers[_RSP], registers[_RIP]
        return place == self[:3] and -result in (*_RESTART, _RESTART_BLOCK, _EINTR)


def _ptrace(request: int, thread_id: int, data: object = None) -> None:
    if _libc.ptrace(request, thread_id, None, data) == -1:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@contextlib.contextmanager
def stopped(process_id: int) -> Iterator[None]:
    """Stop the main thread in the block, wherever it is. Ctrl-C waits for the end of the block."""
    pending = 0
    with _signals_held():
        _ptrace(_SEIZE, process_id)
        try:
            _ptrace(_INTERRUPT, process_id)
            pending = _wait_for_stop(process_id)
            yield
        finally:
            # it has ended, or has not stopped: the end of this process detaches it
            with contextlib.suppress(OSError):
                _ptrace(_DETACH, process_id, ctypes.c_void_p(pending))


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until after the block.

    By their handlers, not by the thread's mask: another thread would take a masked signal, and Python would
    still handle it in this one.
    """
    if threading.current_thread() is not threading.main_thread():  # which no handler interrupts
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in handlers.items():
        if handler is not None:  # None: not set by Python, and could not be restored
            signal.signal(number, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        for one in came:
            signal.raise_signal(one)


def _wait_for_stop(process_id: int) -> int:
    """Return the signal that stopped it earlier, and that must be delivered; 0: none."""
    deadline = time.monotonic() + _STOP_SECONDS
    while True:
        found, status = os.waitpid(process_id, os.WNOHANG | _ALL_THREADS)
        if found:
            return 0 if status >> _EVENT_SHIFT else os.WSTOPSIG(status)
        if time.monotonic() > deadline:
            raise AttachError(
                f"process {process_id} does not stop: its main thread waits for a device; try again"
            )
        time.sleep(0.0001)


def accept(process_id: int, folder: Path) -> None:
    """Accept any process that the kernel lets this user debug."""


@contextlib.contextmanager
def _memory(process_id: int, mode: str, check: Check) -> Iterator[io.FileIO]:
    """Open the memory of a process that is stopped or only read, and then check the process.

    In this order: a program that is started with more rights before the opening is seen by the check, and one
    that is started later has other memory than what was opened.
    """
    with process_folder(process_id) as folder, io.FileIO(folder / "mem", mode) as memory:
        check(process_id, folder)
        yield memory


def call_in_main_thread(
    process_id: int, calls: Sequence[Call], stub_at: int, *, wait: Wait | None = None, check: Check = accept
) -> float | None:
    """Make the main thread execute ``calls``, by code at ``stub_at``; returns the seconds of the stop.

    ``wait``: only if it is in this wait, which then ends early, as after a signal; otherwise returns None,
    and nothing is done. Without it, a call must not sleep: the interrupted wait goes on. ``check`` raises
    ``AttachError`` for a stopped process that nothing may be done to.
    """
    begin = time.perf_counter()
    with stopped(process_id), _memory(process_id, "r+b", check) as memory:
        registers = _registers(process_id)
        if wait is not None and not wait.goes_on(registers):
            return None
        _leave_system_call(registers, may_sleep=wait is not None)
        _write(memory.fileno(), stub_at, machine_code(calls, registers[_RIP]))
        registers[_RIP] = stub_at
        _ptrace(_SET_REGISTERS, process_id, ctypes.create_string_buffer(_REGISTERS.pack(*registers)))
    return time.perf_counter() - begin


def write_memory(
    process_id: int, address: int, data: bytes, *, code: range = range(0), check: Check = accept
) -> bool:
    """Write ``data`` while the main thread is stopped; False, and nothing done, if it is inside ``code``."""
    with stopped(process_id), _memory(process_id, "r+b", check) as memory:
        if code and _is_inside(process_id, memory.fileno(), code):
            return False
        _write(memory.fileno(), address, data)
        return True


def _is_inside(process_id: int, memory: int, code: range) -> bool:
    """Return whether the stopped main thread executes ``code``, or will return to it."""
    registers = _registers(process_id)
    if registers[_RIP] in code:
        return True
    stack = registers[_RSP]
    live = struct.iter_unpack("<Q", os.pread(memory, _stack_end(process_id, stack) - stack & ~7, stack))
    return any(word in code for (word,) in live)


def _stack_end(process_id: int, address: int) -> int:
    with open(f"/proc/{process_id}/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            start, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
            if start <= address < end:
                return min(end, address + _STACK_BYTES)
    return address


def _registers(process_id: int) -> list[int]:
    buffer = ctypes.create_string_buffer(_REGISTERS.size)
    _ptrace(_GET_REGISTERS, process_id, buffer)
    return list(_REGISTERS.unpack(buffer.raw))


def read_memory(process_id: int, address: int, size: int, *, check: Check = accept) -> bytes:
    with _memory(process_id, "rb", check) as memory:
        return os.pread(memory.fileno(), size, address)


def _write(memory: int, address: int, data: bytes) -> None:
    if os.pwrite(memory, data, address) != len(data):
        raise AttachError(f"only a part of {len(data)} bytes could be written at {address:#x}")


def _leave_system_call(registers: list[int], *, may_sleep: bool) -> None:
    """Resume an interrupted system call as the kernel would on the way back to it."""
    number, result = registers[_ORIG_RAX], registers[_RAX] - _REGISTER_SPACE
    registers[_ORIG_RAX] = _NO_SYSCALL
    if number == _NO_SYSCALL:
        return
    if -result in _RESTART:
        registers[_RAX] = number
        registers[_RIP] -= 2  # repeat the instruction `syscall`
    elif -result == _RESTART_BLOCK:
        if may_sleep:
            registers[_RAX] = _REGISTER_SPACE - _EINTR
        else:
            registers[_RAX] = 219  # restart_syscall
            registers[_RIP] -= 2


_SAVE = bytes.fromhex(
    "488d642480"  # lea rsp, [rsp-128]: skip the red zone of the interrupted function
    "9c"  # pushfq
    "5051525355565741504151415241534154415541564157"  # push rax, rcx, rdx, rbx, rbp, rsi, rdi, r8 .. r15
    "4889e5"  # mov rbp, rsp
    "4881ec00400000"  # sub rsp, 16384
    "4883e4c0"  # and rsp, -64
    "fc"  # cld
    "31c0"  # xor eax, eax
    "488dbc2400020000"  # lea rdi, [rsp+512]
    "b908000000f348ab"  # mov ecx, 8; rep stosq: xsave needs an empty header
    "b8ffffffffbaffffffff480fae2424"  # mov eax, -1; mov edx, -1; xsave64 [rsp]
)
_RESTORE = bytes.fromhex(
    "b8ffffffffbaffffffff480fae2c24"  # mov eax, -1; mov edx, -1; xrstor64 [rsp]
    "4889ec"  # mov rsp, rbp
    "415f415e415d415c415b415a415941585f5e5d5b5a5958"  # pop r15 .. r8, rdi, rsi, rbp, rbx, rdx, rcx, rax
    "9d"  # popfq
    "488da42480000000"  # lea rsp, [rsp+128]
    "ff2500000000"  # jmp [rip+0]: to the address that follows
)


def machine_code(calls: Sequence[Call], back_to: int) -> bytes:
    """Return instructions that make ``calls`` in order, preserve all registers, and go on at ``back_to``."""
    code = _SAVE
    for number, (function, *arguments) in enumerate(calls):
        for argument, (prefix, from_rbx) in zip(arguments, (("48bf", "89df"), ("48be", "89de"))):
            if argument == FIRST_RESULT:
                code += bytes.fromhex(from_rbx)
            else:
                code += bytes.fromhex(prefix) + struct.pack("<Q", argument)
        code += bytes.fromhex("48b8") + struct.pack("<Q", function) + bytes.fromhex("ffd0")
        if number == 0:
            code += bytes.fromhex("89c3")  # mov ebx, eax
    return code + _RESTORE + struct.pack("<Q", back_to)
