"""Ctrl-C under `sgl-aspects run`, and interpreters without this package."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.distributions import install
from tests.support.processes import command, output_of, python, wait_until

INTERRUPTED = """
import threading, time

def meanwhile():
    while True:
        time.sleep(0.02)
        eval("1 + 1")  # as importing modules does

threading.Thread(target=meanwhile, daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def stopped(collector: int) -> Iterator[None]:
    """Stop this process during the block."""
    os.kill(collector, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(collector, signal.SIGCONT)


def wait_until_it_waits_for_its_collector(process_id: int) -> None:
    wait_until(lambda: b"poll" in Path(f"/proc/{process_id}/wchan").read_bytes())


@pytest.mark.parametrize("is_traced", [False, True])
def test_ctrl_c_ends_a_traced_program_as_any_other(tmp_path: Path, is_traced: bool) -> None:
    run = ["-m", "sgl_aspects", "run", "--file", str(tmp_path / "spans.jsonl"), "--", sys.executable]
    command = [sys.executable, *(run if is_traced else []), "-c", INTERRUPTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == -signal.SIGINT


def test_ctrl_c_while_hooks_are_loaded_ends_the_program_quietly(tmp_path: Path) -> None:
    (tmp_path / "loading.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    install(tmp_path, "loading", "[sgl_aspects.plugins]\nloading = loading:activate\n")
    with subprocess.Popen(
        [sys.executable, "-m", "sgl_aspects", "run", "--level", "0", "--", sys.executable, "-c", ""],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        assert (process.wait(60), process.stderr.read()) == (-signal.SIGINT, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_program_waits_for_its_collector_is_quiet(tmp_path: Path, number: int) -> None:
    """The collector is stopped: without the signal the wait would last for ten minutes."""
    program = (
        "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); "
        "import os, sgl_aspects.tracing.session as s; print(s.current().collector_process_id, flush=True)"
    )
    command = [sys.executable, "-m", "sgl_aspects", "run", "--file", str(tmp_path / "spans"), "--"]
    with subprocess.Popen(
        [*command, sys.executable, "-c", f"{program}; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SGL_ASPECTS_TRACE_FLUSH_SECONDS": "600"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with stopped(int(process.stdout.readline())):
            process.stdin.close()
            wait_until_it_waits_for_its_collector(process.pid)
            process.send_signal(number)
            assert process.wait(60) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


EVALUATES = """
import sgl_aspects.tracing.session, threading, time
def meanwhile():
    while True:
        eval("open('evaluated', 'a').write('x')")
        time.sleep(0.02)
threading.Thread(target=meanwhile, daemon=True).start()
print(sgl_aspects.tracing.session.current().collector_process_id, flush=True)
time.sleep(60)
"""


def test_a_second_ctrl_c_does_not_change_what_ended_the_program(tmp_path: Path) -> None:
    evaluated = tmp_path / "evaluated"
    command = [sys.executable, "-m", "sgl_aspects", "run", "--file", str(tmp_path / "spans"), "--"]
    with subprocess.Popen(
        [*command, sys.executable, "-c", EVALUATES],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        with stopped(int(process.stdout.readline())):
            wait_until(evaluated.exists)
            process.send_signal(signal.SIGINT)
            wait_until_it_waits_for_its_collector(process.pid)
            before = evaluated.stat().st_size
            wait_until(lambda: evaluated.stat().st_size > before + 1)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == -signal.SIGINT


def test_a_child_of_an_interpreter_without_this_package_runs_untraced(tmp_path: Path) -> None:
    output_of(python("-m", "venv", "--without-pip", tmp_path / "other"))
    other = str(tmp_path / "other" / "bin" / "python")
    result = command("run", "--level", "0", "--", other, "-c", "print(1)")
    assert (result.returncode, result.stdout) == (0, "1\n")
    told = "No module named 'sgl_aspects'; install it there, or run a Python that has it"
    assert result.stderr == f"sgl-aspects: {other} runs untraced: {told}\n"
