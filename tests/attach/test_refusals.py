"""Processes that the command never touches, and its messages."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

import sgl_aspects
from sgl_aspects.attach.operation import Run
from sgl_aspects.attach.process_tree import Process, engine_of, engine_tree, read_process
from sgl_aspects.attach.ptrace import stopped
from sgl_aspects.attach.rights import Facts, refusal
from sgl_aspects.cli.main import main
from sgl_aspects.errors import AttachError
from tests.support.attachable import attaching, command, finish, run_folder, running
from tests.support.processes import wait_until
from tests.support.tree import PACKAGE

_ALLOWED = Facts(
    process_id=7,
    user=1000,
    our_user=1000,
    has_capability=False,
    ptrace_scope=0,
    tracer=0,
    is_stopped=False,
    is_inside=True,
    machine="x86_64",
)

_REFUSED = {
    "another user": ({"user": 33}, "sudo sgl-aspects attach 7"),
    "another user, root without the capability": ({"our_user": 0}, "--cap-add SYS_PTRACE"),
    "ptrace scope 1": ({"ptrace_scope": 1}, "sudo sysctl kernel.yama.ptrace_scope=0"),
    "ptrace scope 2": ({"ptrace_scope": 2}, "kernel.yama.ptrace_scope is 2"),
    "ptrace scope 3": ({"ptrace_scope": 3, "has_capability": True}, "sgl-aspects run --dormant"),
    "another container": ({"is_inside": False}, "docker exec CONTAINER sgl-aspects attach 7"),
    "a debugger": ({"tracer": 99}, "traced by process 99"),
    "stopped": ({"is_stopped": True}, "kill -CONT 7"),
    "a machine that is not x86-64": ({"machine": "aarch64"}, "sgl-aspects run --dormant"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_each_refusal_is_one_line_with_the_setting_and_the_command(case: str) -> None:
    changes, expected = _REFUSED[case]
    reason = refusal(dataclasses.replace(_ALLOWED, **changes))  # type: ignore[arg-type]
    assert reason is not None
    assert expected in reason
    assert "\n" not in reason


def test_the_capability_helps_against_ptrace_scope_1_and_root_against_another_user() -> None:
    assert refusal(_ALLOWED) is None
    assert refusal(dataclasses.replace(_ALLOWED, ptrace_scope=1, has_capability=True)) is None
    assert refusal(dataclasses.replace(_ALLOWED, our_user=0, has_capability=True)) is None
    assert refusal(dataclasses.replace(_ALLOWED, our_user=0, has_capability=False)) is not None


def test_a_prepared_process_needs_no_ptrace() -> None:
    refused = dataclasses.replace(_ALLOWED, ptrace_scope=3, machine="aarch64")
    assert refusal(refused, needs_ptrace=False) is None


def _attach(process_id: int, *words: str, prefix: Sequence[str] = ()) -> str:
    asked = [*prefix, *command("attach", str(process_id), "--dry-run", *words)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_another_users_process_and_one_that_is_being_debugged(tmp_path: Path) -> None:
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    probe = [*nobody, sys.executable, "-c", "import sgl_aspects.cli.main"]
    if subprocess.run(probe, capture_output=True, cwd=tmp_path.root, check=False).returncode:
        pytest.skip(f"user 65534 cannot read {sys.executable} and this checkout")
    with running(tmp_path) as program:
        assert f"sudo sgl-aspects attach {program.id}" in _attach(program.id, "--force", prefix=nobody)
        with stopped(program.id):
            assert f"traced by process {os.getpid()}" in _attach(program.id, "--force")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv")
def test_a_process_with_more_capabilities(tmp_path: Path) -> None:
    with running(tmp_path) as program:
        less = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]
        words = [*less, sys.executable, "-m", "sgl_aspects", "attach", str(program.id), "--force"]
        said = subprocess.run(words, capture_output=True, text=True, timeout=60).stderr
    assert f"process {program.id}: " in said
    assert "docker run --cap-add SYS_PTRACE" in said
    assert "sgl-aspects run --dormant" in said


def test_a_folder_without_room_for_the_modules_is_one_line(tmp_path: Path) -> None:
    # As a disk that is full after so much. No byte code is left to be written, which the limit would cut off.
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(PACKAGE)], check=False)
    limited = ["sh", "-c", 'ulimit -f 16 && PYTHONDONTWRITEBYTECODE=1 exec "$@"', "sh"]
    with running(tmp_path) as program:
        words = [*limited, *command("attach", str(program.id), "--force", "--file=/dev/null")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert "make room there, or set TMPDIR" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert done.returncode == 2
        assert program.states == ["original"]


def test_a_package_in_an_archive_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sgl_aspects, "__file__", "/app.pyz/sgl_aspects/__init__.py")
    with running(tmp_path) as program:
        assert main(["attach", str(program.id), "--force", "--file=/dev/null"]) == 2
    assert "/app.pyz/sgl_aspects is in an archive: install" in capsys.readouterr().err


def test_shared_memory_that_takes_no_modules_is_not_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=5 << 8, f_frsize=4096, f_files=0))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = Run.make()
    run.discard()
    assert run.folder.parent == tmp_path


def test_a_process_that_is_not_python() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            assert "is not Python" in _attach(process.pid, "--force")
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
@pytest.mark.parametrize("kind", ["pid", "mount"])
def test_a_process_of_another_container(kind: str, tmp_path: Path) -> None:
    with running(tmp_path, prefix=["unshare", f"--{kind}", "--fork", "--kill-child"]) as program:
        (inside,) = Path(f"/proc/{program.id}/task/{program.id}/children").read_text().split()
        assert "in another container or a chroot" in _attach(int(inside), "--force")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_process_in_a_chroot_sees_none_of_the_files_that_it_would_run(tmp_path: Path) -> None:
    code = "import os, sys, time; os.chroot(sys.argv[1]); print('x', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            assert "in another container or a chroot: run the command" in _attach(process.pid, "--force")
        finally:
            process.kill()


def test_a_long_chain_of_processes_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than Python recurses: any user can make one."""
    here = read_process(os.getpid())
    assert here is not None
    chain = [dataclasses.replace(here, id=number, parent=number - 1) for number in range(2, 3000)]
    known = {str(process.id): process for process in chain}
    monkeypatch.setattr("sgl_aspects.attach.process_tree.os.listdir", lambda _: list(known))
    monkeypatch.setattr("sgl_aspects.attach.process_tree.read_process", lambda number: known[str(number)])
    monkeypatch.setattr(Process, "is_python", True)
    assert engine_tree(2, is_wanted=True) == chain


_GOES_ON = "the run goes on until they are detached from: sgl-aspects detach {}\n"


def test_a_process_that_a_debugger_holds_at_the_end_is_detached_from_afterwards(tmp_path: Path) -> None:
    with running(tmp_path) as program:
        process = attaching(program, "--for=3s")
        wait_until(lambda: (found := run_folder(process)) is not None and (found / "collector.lock").exists())
        run = run_folder(process)
        with stopped(program.id):
            assert process.stdout is not None
            until = _GOES_ON.format(program.id)
            *_, last = itertools.takewhile(lambda line: line != until, process.stdout)
            assert "NOT detached" in last
        wait_until(lambda: "woven" in program.states and program.states[-1] == "original")
        wait_until(lambda: run is not None and not run.exists())
        finish(process)
        assert process.returncode == 1


def test_of_a_long_command_line_the_beginning_is_read() -> None:
    """Any user can make one of gigabytes, with PR_SET_MM, which attaching to another process reads, too."""
    words = [sys.executable, "-c", "print(flush=True); input()"]
    given = [*words, *["x" * 100_000] * 12]
    with subprocess.Popen(given, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = read_process(process.pid)
        process.communicate(b"\n")
    assert found is not None
    assert found.words[:3] == tuple(words)
    assert sum(map(len, found.words)) < 200_000


def test_a_process_that_is_not_there() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert f"there is no process {process.pid}" in _attach(process.pid)


def test_a_process_that_ends_while_the_tree_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True])
    monkeypatch.setattr(Process, "is_python", property(lambda _: next(answers, False)))
    with pytest.raises(AttachError, match=f"process {os.getpid()} has ended"):
        engine_tree(os.getpid(), is_wanted=True)


def test_a_python_program_that_is_not_an_engine(tmp_path: Path) -> None:
    with running(tmp_path) as program:
        assert "add --force" in _attach(program.id)
        assert [process.id for process in engine_tree(program.id, is_wanted=True)] == [program.id]


def test_level_0_and_disabled_tracing_would_record_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as program:
        said = _attach(program.id, "--force", "--level", "0")
        assert "at level 0 nothing is recorded: choose --level 1 to 4" in said
        assert f"sgl-aspects detach {program.id}" in said
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        assert "the environment disables tracing" in _attach(program.id, "--force")


_TREE = """
import multiprocessing, subprocess, sys, time
def work(): time.sleep(1000)
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=work); child.start()
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    tool = subprocess.Popen(["sleep", "1000"])
    print(child.pid, other.pid, tool.pid, flush=True)
    try: time.sleep(1000)
    finally: child.kill(), other.kill(), tool.kill()
"""


def test_the_tree_is_found_from_any_process_that_multiprocessing_started(tmp_path: Path) -> None:
    with running(tmp_path, source=_TREE) as program:
        child, other, tool = map(int, program.said[0].split())
        try:
            from_child = [process.id for process in engine_tree(child, is_wanted=True)]
            assert child in from_child
            assert tool not in from_child
            whole = [process.id for process in engine_tree(program.id, is_wanted=True)]
            assert set(whole) == {program.id, child, other}  # no resource tracker, and nothing but Python
            with pytest.raises(AttachError, match="--force"):
                engine_tree(child)
        finally:
            for process_id in (child, other, tool):
                os.kill(process_id, 9)


def test_an_engine_is_known_by_its_command_line() -> None:
    words = {
        ("python", "-m", "sglang.launch_server", "--model-path", "x"): "sglang",
        ("sglang::scheduler_TP0",): "sglang",
        ("/venv/bin/python", "/venv/bin/sgl-aspects", "serve", "model"): "embedded",
        ("python", "app.py"): None,
        ("python", "notsglang.py"): None,
        ("python", "-X", "dev", "-m", "sglang.launch_server"): "sglang",
        ("/venv/bin/python3", "/venv/bin/sglang", "serve", "--model-path", "x"): "sglang",
        # Named by an argument alone:
        ("python", "-m", "pytest", "-m", "sglang", "tests/engines/sglang/test_attach.py"): None,
        ("python", "bench.py", "--backend", "sglang"): None,
        ("python", "-c", "import sglang"): None,
    }
    here = read_process(os.getpid())
    assert here is not None
    for line, engine in words.items():
        assert engine_of(dataclasses.replace(here, words=line)) == engine, line


def test_this_test_runs_python() -> None:
    here = read_process(os.getpid())
    assert here is not None
    assert here.is_python
    assert sys.executable
