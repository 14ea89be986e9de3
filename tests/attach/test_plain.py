"""Any Python program with an ``aspects.toml``: attached to while it runs, and detached from."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sgl_aspects.attach.injection import run_file
from sgl_aspects.attach.process_tree import engine_tree
from sgl_aspects.attach.ptrace import Wait, call_in_main_thread, stopped
from sgl_aspects.attach.rights import process_folder, started
from tests.support.attachable import (
    PROGRAM,
    Program,
    attaching,
    command,
    finish,
    kill_command,
    python_of,
    run_folder,
    running,
    span_names,
)
from tests.support.processes import wait_until

pytestmark = [pytest.mark.attach, pytest.mark.usefixtures("ptrace")]


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_a_program_is_traced_from_outside_and_is_as_before_afterwards(version: str, tmp_path: Path) -> None:
    interpreter = python_of(version)
    if interpreter is None:
        pytest.skip(f"Python {version} is not here")
    with running(tmp_path, interpreter=interpreter) as program:
        output = finish(attaching(program, "--for", "1s"))
        assert "2 functions woven" in output
        assert "2 originals are back" in output
        assert "NOT" not in output, output
        assert program.lives()
        wait_until(lambda: program.states == ["original", "woven", "original"])
    assert {"sell", "wrap"} <= {name.split(".")[-1] for name in span_names(tmp_path / "spans.jsonl")}


def test_nothing_of_ours_is_left_open_in_the_process(tmp_path: Path) -> None:
    with running(tmp_path) as program:
        own = Path(f"/proc/{program.id}")
        before = len(list((own / "fd").iterdir())), len(list((own / "task").iterdir()))
        for number in range(2):
            output = finish(attaching(program, "--for", "0.2s", spans=f"spans-{number}.jsonl"))
            assert "2 originals are back" in output
            assert (len(list((own / "fd").iterdir())), len(list((own / "task").iterdir()))) == before
            maps = (own / "maps").read_text().splitlines()
            assert [line for line in maps if "sgl-aspects" in line] == []
        wait_until(lambda: program.states == ["original", "woven"] * 2 + ["original"])


def test_a_late_answer_to_detach_is_waited_for(tmp_path: Path) -> None:
    """As of a process on busy processors: the last ring is closed by then, which would end the run."""
    late = """
import gc, time
gc.callbacks.append(lambda phase, info: time.sleep(0 if gc.isenabled() or phase == "start" else 2))
gc.freeze()
"""
    with running(tmp_path, source=late + PROGRAM) as program:
        output = finish(attaching(program, "--for", "4s"))
        assert "2 originals are back" in output, output
        assert "NOT" not in output, output
        folder = re.findall(r"run folder (\S+)", output)
        wait_until(lambda: not Path(*folder).exists())


def test_ctrl_c_lets_go(tmp_path: Path) -> None:
    with running(tmp_path) as program:
        process = attaching(program)
        wait_until((_run_of(process) / "collector.lock").exists)
        process.send_signal(signal.SIGINT)
        output = finish(process)
        assert "2 originals are back" in output
        assert "spans recorded" in output
        wait_until(lambda: program.states[-1] == "original")


def test_spans_that_are_lost_are_counted_once(tmp_path: Path) -> None:
    with running(tmp_path) as program:
        output = finish(attaching(program, "--for", "0.5s", spans="/dev/full"))
    assert "NOT delivered" in output
    assert output.count("spans recorded") == 1


def test_another_command_detaches(tmp_path: Path) -> None:
    with running(tmp_path) as program:
        process = attaching(program)
        wait_until(lambda: program.states[-1:] == ["woven"])
        done = subprocess.run(command("detach", str(program.id)), capture_output=True, text=True, check=True)
        assert "2 originals are back" in done.stdout
        assert program.states[-1] == "original"
        output = finish(process)
        assert "another attach or detach was there" in output
        assert "spans recorded" in output


def test_detach_of_what_is_not_attached_to_is_an_error(tmp_path: Path) -> None:
    with running(tmp_path) as program:
        done = subprocess.run(command("detach", str(program.id)), capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "is not attached to" in done.stderr


_STAGES: dict[str, Callable[[Program, Path], bool]] = {
    "the guard has begun": lambda program, run: True,
    "a process is about to be asked": lambda program, run: any(run.glob("attach/*.py")),
    "a process works on it": lambda program, run: any(run.glob("attach/*.taken")),
    "a process is woven": lambda program, run: program.states[-1:] == ["woven"],
}


def test_kill_9_of_the_command_at_any_stage_harms_no_process(tmp_path: Path) -> None:
    with running(tmp_path) as program:
        for has_come in _STAGES.values():
            process = attaching(program)
            run = _run_of(process)
            wait_until(lambda: has_come(program, run))  # noqa: B023
            kill_command(process)
            wait_until(lambda: not run.exists())  # noqa: B023  the guard has detached, and nothing is left
            wait_until(lambda: program.states[-1:] == ["original"])
            assert program.lives()
        output = finish(attaching(program, "--for", "0.2s"))
        assert "2 functions woven" in output
        assert "2 originals are back" in output


def _run_of(process: subprocess.Popen[str]) -> Path:
    wait_until(lambda: run_folder(process) is not None)
    run = run_folder(process)
    assert run is not None
    return run


def _kill(command: str) -> bool:
    return subprocess.run(["pkill", "-9", "-f", command]).returncode == 0


def test_a_process_detaches_by_itself_when_its_records_are_no_longer_read(tmp_path: Path) -> None:
    with running(tmp_path, pause=0) as program:
        process = attaching(program)
        run = _run_of(process)
        wait_until((run / "collector.lock").exists)
        wait_until(lambda: _kill(f"sgl_aspects.attach.operation {run}"))  # it may not have started yet
        wait_until(lambda: _kill(f"sgl_aspects.collector {run}"))
        kill_command(process)
        wait_until(lambda: program.states[-1:] == ["original"])
        assert program.lives()
        shutil.rmtree(run)


_WAITING = {
    "sleep": "import time\nprint('x', flush=True)\nwhile True:\n    time.sleep(1000)",
    "lock": "import threading\nprint('x', flush=True)\nthreading.Event().wait()",
    "event loop": "import asyncio\nprint('x', flush=True)\nasyncio.new_event_loop().run_forever()",
    "input": "import os\nprint('x', flush=True)\nos.read(os.pipe()[0], 1)",
    "name of any bytes": (
        "import ctypes, time\nctypes.CDLL(None).prctl(15, b'caf\\xe9', 0, 0, 0)\n"
        "print('x', flush=True)\nwhile True: time.sleep(1000)"
    ),
}


@pytest.mark.parametrize("wait", _WAITING)
def test_a_main_thread_that_runs_no_python_is_reached(wait: str, tmp_path: Path) -> None:
    with running(tmp_path, source=_WAITING[wait]) as program:
        _run_marks(program, 2)
        with process_folder(program.id) as folder:  # as the command does, which reads every process
            assert [started(folder)] == [one.started for one in engine_tree(program.id, is_wanted=True)]
        assert program.lives()


def test_a_main_thread_that_waits_is_reached_where_python_has_a_way_of_its_own(tmp_path: Path) -> None:
    """``sys.remote_exec`` waits for its next bytecode, which an idle event loop never runs."""
    interpreter = python_of("3.14")
    if interpreter is None:
        pytest.skip("Python 3.14 is not here")
    with running(tmp_path, source=_WAITING["event loop"], interpreter=interpreter) as program:
        _run_marks(program, 2, interpreter)
        assert program.lives()


def _run_marks(program: Program, count: int, remote_exec: str | None = None) -> None:
    for number in range(count):
        mark, file = program.folder / f"mark-{number}", program.folder / f"{number}.py"
        file.write_text(f"import os; os.close(os.open({str(mark)!r}, os.O_CREAT))")
        run_file(program.id, file, mark.exists, remote_exec=remote_exec)


def test_a_run_that_ends_before_the_process_looks_leaves_no_trace_in_its_log(tmp_path: Path) -> None:
    with running(tmp_path) as program:
        deadline = time.monotonic() + 1
        run_file(program.id, tmp_path / "gone.py", lambda: time.monotonic() > deadline, remote_exec=None)
        _run_marks(program, 1)
        assert program.said == ["original 1 4"]


_NO_THREADS = """
import resource, threading, time
threading.stack_size(1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
print("x", flush=True)
while True:
    time.sleep(0.001)
"""


_OWN_JSON = "import sys, time\nsys.modules['json'] = time\n"
_FAILING = {
    "RuntimeError: can't start new thread": _NO_THREADS,
    "'dump'; it may have a file that is named like": _OWN_JSON + _NO_THREADS.partition("))\n")[2],
}


@pytest.mark.parametrize("why", _FAILING)
def test_a_program_that_cannot_do_it_says_why_at_once_and_goes_on(why: str, tmp_path: Path) -> None:
    with running(tmp_path, source=_FAILING[why]) as program:
        output = finish(attaching(program, "--force", "--for", "1s"))
        assert f"process {program.id} cannot do what it is asked: " in output
        assert why in output
        assert program.lives()
        assert program.said == ["x"]


def test_a_program_with_functions_that_are_named_like_pythons_goes_on(tmp_path: Path) -> None:
    source = "import time\nexec = open = globals = dict = None\nprint('x', flush=True)\n"
    with running(tmp_path, source=f"{source}while True: time.sleep(0.001)") as program:
        _run_marks(program, 2)
        assert program.lives()
        assert program.said == ["x"]


_BUSY = """
import hashlib, os, threading, sys
def allocate():
    while True:
        [bytes(3000 + size) for size in range(50)]
threading.Thread(target=allocate, daemon=True).start()
data, numbers = os.urandom(20000), [float(number) for number in range(2000)]
right = hashlib.sha256(data).digest(), sum(numbers)
print("x", flush=True)
while (hashlib.sha256(data).digest(), sum(numbers)) == right:
    [bytes(3000 + size * 7) for size in range(200)]
print("WRONG", flush=True)
"""


def test_a_busy_main_thread_computes_on_with_every_register_as_it_was(tmp_path: Path) -> None:
    with running(tmp_path, source=_BUSY) as program:
        _run_marks(program, 40)
        assert program.lives()
        assert program.said == ["x"]
        # the last file's thread ends a little after its mark is there
        wait_until(lambda: len(list(Path(f"/proc/{program.id}/task").iterdir())) == 2)


_MOVING = """
import threading, time
print("x", flush=True)
time.sleep(2)
print("on", flush=True)
threading.Event().wait()
"""


def test_a_main_thread_that_has_left_its_wait_is_left_alone(tmp_path: Path) -> None:
    """Anywhere else it may hold a mutex that the call waits for: a deadlock."""
    with running(tmp_path, source=_MOVING) as program:
        wait_until(lambda: Wait.of(program.id) is not None)
        earlier = Wait.of(program.id)
        wait_until(lambda: program.said == ["x", "on"] and Wait.of(program.id) not in (None, earlier))
        assert call_in_main_thread(program.id, [(0,)], 0, wait=earlier) is None
        assert program.lives()


_SIGNALLED = """
import os, signal
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
signal.signal(signal.SIGRTMIN, lambda *_: None)
print(0, flush=True)
found = 0
while True:
    found += len(os.read(reader, 1000))
    print(found, flush=True)
"""


def test_no_signal_is_lost_while_the_main_thread_is_stopped(tmp_path: Path) -> None:
    with running(tmp_path, source=_SIGNALLED) as program:
        sender = threading.Thread(target=_send_signals, args=(program.id, 1000))
        sender.start()
        while sender.is_alive():
            with stopped(program.id):
                pass
        wait_until(lambda: program.said[-1] == "1000", 20)


def _send_signals(process_id: int, count: int) -> None:
    for _ in range(count):
        os.kill(process_id, signal.SIGRTMIN)
        time.sleep(0.0003)


def test_ctrl_c_waits_until_the_main_thread_goes_on(tmp_path: Path) -> None:
    """Also where another thread takes the signal."""
    reached, ended = False, threading.Event()
    taker = threading.Thread(target=ended.wait)
    taker.start()
    with _signals_announced() as announced:
        try:
            with running(tmp_path) as program, pytest.raises(KeyboardInterrupt), stopped(program.id):  # noqa: PT012
                signal.pthread_kill(taker.ident or 0, signal.SIGINT)
                announced.recv(1)
                reached = True
        finally:
            ended.set()
            taker.join()
    assert reached


@contextlib.contextmanager
def _signals_announced() -> Iterator[socket.socket]:
    """Something can be read when a signal has come to any thread."""
    ours, writer = socket.socketpair()
    with ours, writer:
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno())
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(before)


def test_dry_run_touches_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as program:
        output = finish(attaching(program, "--dry-run"))
        assert re.search(rf"process {program.id} .* would be attached to with ptrace, level 3", output)
        assert program.states == ["original"]


def test_a_prepared_program_is_attached_to_without_ptrace(tmp_path: Path) -> None:
    prefix = command("run", "--dormant", "--")
    with running(tmp_path, prefix=prefix) as program:
        assert "through its control block" in finish(attaching(program, "--dry-run"))
        assert "main thread stopped 0.0 ms" in finish(attaching(program, "--for", "0.2s"))
        wait_until(lambda: program.states == ["original", "woven", "original"])


def test_a_prepared_program_has_no_hook_no_thread_and_nothing_of_ours_imported(tmp_path: Path) -> None:
    source = """
        import sys, threading
        ours = [name for name in sys.modules if name.startswith(("sgl_aspects.", "wrapt", "opentelemetry"))]
        print(ours, threading.active_count(), flush=True)
        threading.Event().wait()
    """
    with running(tmp_path, source=source, prefix=command("run", "--dormant", "--")) as program:
        assert program.said == ["[] 1"]


def test_a_hook_of_the_configuration_is_woven_and_taken_back(tmp_path: Path) -> None:
    (tmp_path / "louder.py").write_text("def louder(result, *args, **kwargs):\n    return result\n")
    with running(tmp_path) as program:
        text = '[[hook]]\ntarget = "program:wrap"\nhook = "louder:louder"\ntype = "after"\n'
        (tmp_path / "aspects.toml").write_text(text)
        output = finish(attaching(program, "--for", "0.2s"))
        assert "1 functions woven" in output
        assert "1 originals are back" in output
        wait_until(lambda: program.states == ["original", "woven", "original"])


def test_missing_targets_are_reported_and_the_rest_is_traced(tmp_path: Path) -> None:
    with running(tmp_path) as program:
        with (tmp_path / "aspects.toml").open("a") as file:
            file.write('[[trace]]\ntarget = "program:Shop.buy"\n')
        output = finish(attaching(program, "--for", "0.2s"))
        assert "2 functions woven" in output
        assert "not woven: program:Shop.buy" in output


def test_the_interpreter_of_the_test_is_one_that_is_attached_to() -> None:
    assert python_of(".".join(map(str, sys.version_info[:2]))) is not None
