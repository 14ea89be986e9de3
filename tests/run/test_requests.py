"""Asking a running process, and its answer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sgl_aspects.errors import AttachError, ConfigError
from sgl_aspects.run import prepared, requests
from sgl_aspects.run.process_reports import read_all
from sgl_aspects.run.requests import Prepared, Request, ask, prepared_processes

IDLE = """
import os, sys, threading, time
from sgl_aspects.run import prepared, requests
def answer(request):
    if request["wanted"] == "an error":
        raise ValueError("no")
    return {"process": os.getpid(), "threads": os.listdir("/proc/self/task"), "wanted": request["wanted"]}
sys.modules["asked"] = sys.modules["__main__"]
prepared.prepare(sys.argv[1])
print("ready", len(os.listdir("/proc/self/task")), flush=True)
time.sleep(600)
"""


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that sleeps, and has offered ``asked:answer``."""
    command = [sys.executable, "-c", IDLE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready 1\n"
        yield process
        process.kill()


def test_an_idle_process_answers_and_has_no_thread_that_waits(
    tmp_path: Path, idle: subprocess.Popen[str]
) -> None:
    processes = prepared_processes(tmp_path)
    (answer,) = ask(processes, "asked:answer", {"wanted": "this"}, 20.0)
    assert (answer["process"], answer["wanted"]) == (idle.pid, "this")
    assert len(answer["threads"]) == 2  # its main thread, and the one that answers and ends
    assert [path.name for path in tmp_path.iterdir()] == [prepared.block_prefix() + str(idle.pid)]


def test_several_commands_ask_at_the_same_time(tmp_path: Path, idle: subprocess.Popen[str]) -> None:
    (one,) = prepared_processes(tmp_path)
    answers = ask([one] * 8, "asked:answer", {"wanted": "this"}, 20.0)
    assert [answer["process"] for answer in answers] == [idle.pid] * 8


def test_what_fails_in_the_process_is_the_commands_error(tmp_path: Path, idle: subprocess.Popen[str]) -> None:
    answers = ask(prepared_processes(tmp_path), "asked:answer", {"wanted": "an error"}, 20.0)
    assert answers == [{"error": "ValueError: no"}]
    assert ask(prepared_processes(tmp_path), "not.imported.there:answer", {}, 20.0) == [{}]


_NO_THREADS = """
import resource, sys, threading, time
from sgl_aspects.run import prepared
prepared.prepare(sys.argv[1])
threading.stack_size(1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
print("ready", flush=True)
time.sleep(600)
"""


def test_a_process_that_can_start_no_thread_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")  # whatever its name
    command = [sys.executable, "-c", _NO_THREADS, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        (answer,) = ask(prepared_processes(folder), "asked:answer", {}, 20.0)
        assert f"process {process.pid} cannot do what it is asked" in answer["error"]
        assert "can't start new thread" in answer["error"]
        assert process.poll() is None
        process.kill()
    assert [path.name for path in folder.iterdir()] == [f"{prepared.block_prefix()}{process.pid}"]


_ENDING = """
import os, sys
from sgl_aspects.run import prepared
prepared.prepare(sys.argv[1])
class Last:
    def __del__(self, kill=os.kill, process=os.getpid(), number=prepared.signal_number()):
        kill(process, number)
last = Last()
"""


def test_a_process_that_is_asked_while_its_interpreter_ends_is_not_killed(tmp_path: Path) -> None:
    """As by `sgl-aspects detach` while a server shuts down: it may still have things to write."""
    assert subprocess.run([sys.executable, "-c", _ENDING, str(tmp_path)], timeout=60).returncode == 0


def test_a_process_with_a_module_named_like_one_of_pythons_says_so(tmp_path: Path) -> None:
    """As from a file json.py beside the program."""
    code = f"import sys, types; sys.modules['json'] = types.ModuleType('json'){IDLE}"
    with subprocess.Popen(
        [sys.executable, "-c", code.replace("prepared, requests", "prepared"), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (answer,) = ask(prepared_processes(tmp_path), "asked:answer", {}, 20.0)
        process.kill()
        assert "module 'json' has no attribute 'dump'" in answer["error"]
        assert "a file that is named like this module of Python's" in answer["error"]
        assert process.communicate()[1] == b""


_DAEMON = """
import os, sys
from sgl_aspects.run import prepared
prepared.prepare(sys.argv[1])
os.closerange(3, 1024)
files = [open(f"{sys.argv[1]}/{number}", "w") for number in range(32)]
if not os.fork():
    assert all(os.path.samestat(os.fstat(file.fileno()), os.stat(file.name)) for file in files)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def test_files_of_a_program_that_closed_all_descriptors_stay_its_childrens(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _DAEMON, str(tmp_path)], check=True)


def test_a_killed_process_is_not_asked_and_its_control_block_goes(
    tmp_path: Path, idle: subprocess.Popen[str]
) -> None:
    (one,) = prepared_processes(tmp_path)
    request = Request(tmp_path, one.process_id, "asked:answer", {})
    idle.kill()
    idle.wait()
    assert ask([one], "asked:answer", {}, 20.0) == [{"error": f"process {one.process_id} has ended"}]
    request.remove()
    assert prepared_processes(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_process_of_another_container_is_not_asked_by_its_number_there(tmp_path: Path) -> None:
    """Here that is another process, which the signal would end; they may share /dev/shm."""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", IDLE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready 1\n"
            blocks = list(tmp_path.iterdir())
            assert len(blocks) == 1
            assert prepared_processes(tmp_path) == []
            assert list(tmp_path.iterdir()) == blocks
        finally:
            process.kill()


def test_a_system_without_namespaces_has_control_blocks_too(
    tmp_path: Path, idle: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "_NAMESPACE", "/nowhere")
    assert prepared_processes(tmp_path) == []  # those of `idle` have another name
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_others_may_write_holds_no_processes_to_ask(tmp_path: Path) -> None:
    """They could lock a file with any process's number, which the signal would end."""
    tmp_path.chmod(0o1777)
    with pytest.raises(AttachError, match="is not a folder of yours alone"):
        prepared_processes(tmp_path)


def test_no_process_that_took_over_an_id_is_signalled(tmp_path: Path, idle: subprocess.Popen[str]) -> None:
    (one,) = prepared_processes(tmp_path)
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            taken = Prepared(other.pid, one.control)
            idle.kill()
            idle.wait()
            assert ask([taken], "asked:answer", {}, 20.0) == [{"error": f"process {other.pid} has ended"}]
            assert other.poll() is None
        finally:
            other.kill()


def test_a_report_that_is_a_pipe_or_a_link_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    for make in (os.mkfifo, lambda path: path.symlink_to(tmp_path / "file")):
        report = tmp_path / "1-a.hooks.json"
        make(report)
        with pytest.raises(ConfigError, match="is not a report"):
            list(read_all(tmp_path))
        report.unlink()


def test_a_living_process_writes_its_report_again_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "aspects.toml").write_text(
        '[[hook]]\ntarget = "victim:used"\nhook = "victim:passes_on"\ntype = "around"\n'
    )
    (tmp_path / "victim.py").write_text(
        "def used(): return 1\ndef passes_on(original_fn, *args): return original_fn(*args)\n"
    )
    words = ["--level", "0", "--report", "reports", "--config", "aspects.toml", "--"]
    program = "import victim, time; victim.used(); print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-m", "sgl_aspects", "run", *words, sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (report,) = read_all(tmp_path / "reports")
        process.send_signal(signal.SIGSTOP)
        monkeypatch.setattr(requests, "_START_SECONDS", 0.2)
        assert list(read_all(tmp_path / "reports")) == [report]
        assert (
            f"process {process.pid}: its latest report is shown: process {process.pid} has run no"
            in caplog.text
        )
        process.kill()
        process.wait()
    assert not report.ended
    assert [hook.calls for hook in report.report.hooks if hook.target == "victim:used"] == [1]
    assert list(read_all(tmp_path / "reports")) == [report]


@pytest.mark.timeout(30)
def test_why_a_process_cannot_begin_is_not_waited_for(tmp_path: Path) -> None:
    """It is the process's own file, and may be a pipe."""
    request = Request(tmp_path, os.getpid(), "asked:answer", {})

    def carry(script: Path, has_begun: Callable[[], bool]) -> float:
        os.mkfifo(f"{script}{prepared.FAILED}")
        return float(has_begun())

    with pytest.raises(OSError, match="not a file"):
        request.carry(carry)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, Path.touch], ids=["pipe", "folder", "empty"])
def test_what_is_no_answer_is_neither_waited_for_nor_a_traceback(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    request = Request(tmp_path, os.getpid(), "asked:answer", {})
    make(request.taken.with_suffix(".answer"))
    with pytest.raises(AttachError, match=rf"process {os.getpid()} has given no answer: .*\.answer"):
        request.read()
