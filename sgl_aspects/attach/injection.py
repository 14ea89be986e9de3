"""Makes another Python process run a script in a short-lived thread.

Python 3.14 and newer: ``sys.remote_exec``. Before, and if the main thread waits in a system call and so runs
no bytecode: :mod:`ptrace` makes it call ``Py_AddPendingCall``, which schedules a call between two bytecodes,
where the interrupted code holds no lock that matters. If the wait continues, the thread is made to run the
pending call in that wait, holding the GIL.

The script there is one line that starts a thread; the thread does the work and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from sgl_aspects.attach import debugging
from sgl_aspects.attach.elf import python_image, unused_code
from sgl_aspects.attach.ptrace import FIRST_RESULT, Call
from sgl_aspects.errors import AttachError
from sgl_aspects.run import prepared

_FUNCTIONS = ("Py_AddPendingCall", "PyRun_SimpleString", "PyGILState_Ensure", "PyGILState_Release")
# The injected code: two stubs, since one may still be in use, and then the text.
_STUB_BYTES = 512
_CODE_BYTES = 2 * _STUB_BYTES
_CLEARING_ATTEMPTS, _CLEARING_SECONDS = 20, 0.05
_BYTECODE_SECONDS = 1.0
_WAITING_SECONDS = 0.2
_START_SECONDS = 10.0

# Name spaces are its own: nothing is imported, nothing is put into any module, and no function of the
# program's that is named like a built-in one is called.
_LINE = "__import__('builtins').exec({start!r}, {{'__name__': 'sgl_aspects_attach', **{paths!r}}})\n"
# An exception that left it would end the process with a SystemError, as from a pending call that fails. A
# Ctrl-C that comes here is the program's.
_START = """
try:
    __import__('_thread').start_new_thread(exec, ({thread!r}, dict(globals())))
except KeyboardInterrupt:
    __import__('_thread').interrupt_main()
except BaseException as error:
    try:
        with open(failed, 'w') as file:
            file.write(type(error).__name__ + ': ' + str(error))
    except BaseException:
        pass
"""
# Without the file the run has ended meanwhile: nothing is printed then.
_THREAD = """
try:
    with open(path) as file:
        source = file.read()
except OSError:
    source = ''
try:
    exec(compile(source, path, 'exec'))
except BaseException as error:
    with open(failed, 'w') as file:
        file.write(type(error).__name__ + ': ' + str(error))
"""


def run_file(
    process_id: int, path: Path, has_started: Callable[[], bool], *, remote_exec: str | None
) -> float:
    """Run the Python file ``path`` in a new thread; returns the seconds for which its main thread was
    stopped.

    ``has_started`` returns whether the file runs; it may be started twice, and must tolerate that.
    ``remote_exec``: the interpreter of the process, if that has ``sys.remote_exec``. Raises ``AttachError``
    if it has not started in time.
    """
    paths = {"path": str(path), "failed": f"{path}{prepared.FAILED}"}
    line = _LINE.format(start=_START.format(thread=_THREAD), paths=paths)
    if remote_exec is not None:
        _remote_exec(remote_exec, process_id, path, line)
        can_read_wait = platform.machine() == "x86_64"
        if _wait(has_started, _BYTECODE_SECONDS if can_read_wait else _START_SECONDS):
            return 0.0
        if not can_read_wait:
            raise AttachError(f"process {process_id} has run no Python for {_START_SECONDS:g} s; try again")
    image = python_image(process_id)
    found = image.addresses(_FUNCTIONS) if image is not None else {}
    if len(found) < len(_FUNCTIONS):
        raise AttachError(f"process {process_id} is not Python: it exports no Py_AddPendingCall")
    text = line.encode() + b"\0"
    code_at = _find_place(process_id, _CODE_BYTES + len(text))
    text_at = code_at + _CODE_BYTES
    if not debugging.write(process_id, text_at, text):
        raise AttachError(f"process {process_id} rejected the injected text")
    add = [(found["Py_AddPendingCall"], found["PyRun_SimpleString"], text_at)]
    stood = debugging.call(process_id, add, code_at) or 0.0
    try:
        if not _wait(has_started, _BYTECODE_SECONDS):
            stood = max(stood, _run_in_wait(process_id, found, code_at, has_started))
    finally:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
            _clear(process_id, code_at, len(text))
    return stood


def _clear(process_id: int, code_at: int, text_size: int) -> None:
    """Make everything zero again. A call that is still pending finds an empty text from now on."""
    debugging.write(process_id, code_at + _CODE_BYTES, b"\0")
    for _ in range(_CLEARING_ATTEMPTS):
        # for a main thread that is just reading the text, or leaving the injected code
        time.sleep(_CLEARING_SECONDS)
        nothing, code = bytes(_CODE_BYTES + text_size), range(code_at, code_at + _CODE_BYTES)
        if debugging.write(process_id, code_at, nothing, code=code):
            return


def _run_in_wait(
    process_id: int, found: dict[str, int], code_at: int, has_started: Callable[[], bool]
) -> float:
    """Make a waiting main thread run the text itself: it runs no bytecode.

    Only in that wait: elsewhere it may hold one of the GIL's own locks.
    """
    calls: list[Call] = [
        (found["PyGILState_Ensure"],),
        (found["PyRun_SimpleString"], code_at + _CODE_BYTES),
        (found["PyGILState_Release"], FIRST_RESULT),
    ]
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        wait = debugging.wait_of(process_id)
        if _wait(has_started, _WAITING_SECONDS):
            return 0.0
        if wait is None or wait != debugging.wait_of(process_id):
            continue  # it is running: it will execute bytecodes
        stood = debugging.call(process_id, calls, code_at + _STUB_BYTES, wait=wait)
        if stood is not None:
            if _wait(has_started, _BYTECODE_SECONDS):
                return stood
            break
    if _wait(has_started, max(0.0, deadline - time.monotonic())):
        return 0.0
    raise AttachError(
        f"process {process_id} has run no Python for {_START_SECONDS:g} s: its main thread is busy in "
        "compiled code that holds the GIL; try again"
    )


def _find_place(process_id: int, size: int) -> int:
    for start, room in unused_code(process_id, size):
        if not any(debugging.read(process_id, start, room)):
            return start
    if not os.path.exists(f"/proc/{process_id}/exe"):
        raise AttachError(f"process {process_id} has ended")
    raise AttachError(f"process {process_id} has no library with {size} unused bytes behind its code")


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _remote_exec(interpreter: str, process_id: int, path: Path, line: str) -> None:
    """Call ``sys.remote_exec`` in the process's own interpreter: both sides must be of one version."""
    script = path.with_suffix(".start.py")
    script.write_text(line)
    script.chmod(path.stat().st_mode)
    command = f"import sys; sys.remote_exec({process_id}, {json.dumps(os.fspath(script))})"
    done = subprocess.run(
        [interpreter, "-I", "-S", "-c", command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise AttachError(f"process {process_id} refuses sys.remote_exec: {reason[0]}")
