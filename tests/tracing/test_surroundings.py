"""A recorder among other runs, full disks, folders that cannot be written, and processes that fork."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.errors import ConfigError
from sgl_aspects.run import folder as run_folder
from sgl_aspects.tracing import attach
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import SpanEnd, SpanType
from sgl_aspects.tracing.session import current
from tests.support import workers
from tests.support.processes import command, is_running, output_of, python, wait_until
from tests.support.rings import PLAIN, poll, read_all
from tests.support.sessions import begin, read_file
from tests.support.tiny_models import make_llama

pytestmark = pytest.mark.usefixtures("forked_schedulers")

spawn = multiprocessing.get_context("spawn")


def test_two_engines_on_one_machine_do_not_mix(tmp_path: Path) -> None:
    """The same request ids at the same time; each ends with its own run, and leaves the other alone."""
    owners = []
    for name in ("one", "other"):
        ready, theirs = spawn.Pipe()
        owner = spawn.Process(target=workers.own_a_run, args=(theirs, str(tmp_path / name)))
        owner.start()
        folder, collector = ready.recv()
        scheduler = spawn.Process(target=workers.record_like_a_scheduler, args=(folder, [], "end"))
        scheduler.start()
        owners.append((owner, scheduler, folder, collector))
    assert len({folder for _, _, folder, _ in owners}) == 2
    for owner, scheduler, folder, collector in owners:
        scheduler.join()
        owner.kill()
        owner.join()
        wait_until(lambda: not is_running(collector) and not os.path.exists(folder))  # noqa: B023
        assert sum(is_running(each[3]) for each in owners) <= 1
    for (owner, scheduler, _, _), name in zip(owners, ("one", "other")):
        spans = [*read_file(tmp_path / name)]
        assert {span.resource["process.pid"] for span in spans} == {owner.pid, scheduler.pid}
        assert sorted(span.name for span in spans) == ["chat m", "scheduler.step", "scheduler.step"]
        owner.close()
        scheduler.close()


def test_control_of_a_run_whose_processes_are_gone(tmp_path: Path) -> None:
    writer = spawn.Process(target=workers.record_by_level, args=(str(tmp_path), True))
    writer.start()
    writer.join()
    for arguments in (["--level", "1"], ["--off"], []):
        done = command("control", "--run", str(tmp_path), *arguments)
        assert "Traceback" not in done.stderr
        assert "ended" in done.stdout + done.stderr
    done = command("control", "--pid", str(writer.pid), "--level", "1")
    assert done.returncode != 0
    assert "no traced run" in done.stderr
    writer.close()


def test_a_disk_that_is_full_costs_spans_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with attach(file="/dev/full") as session:
        begin(session, "r1")()
        begin(session, "r2")()
    summary = session.close()
    assert not summary.problem
    assert summary.spans_recorded == 2
    assert summary.not_delivered == {"otlp-json-file": 2}
    assert "No space left on device" in capfd.readouterr().err


def test_without_shared_memory_the_run_is_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = run_folder.make_run_folder()
    assert Path(folder).parent == tmp_path
    assert os.stat(folder).st_mode & 0o777 == 0o700


def test_a_folder_whose_name_is_not_utf8_may_hold_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / os.fsdecode(b"caf\xe9")
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(("/dev", "/run")))
    with attach(file=str(tmp_path / "spans")) as session:
        begin(session, "r")()
    assert Path(session.run_folder).parent == place
    assert session.close().exported == {"otlp-json-file": 1}


def test_a_folder_without_file_locks_does_not_hold_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network's, for example: a collector could not tell which processes live, and recorded nothing."""
    flock = fcntl.flock

    def lacking(descriptor: int, kind: int) -> None:
        if str(tmp_path) not in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSYS, "Function not implemented")
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", lacking)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert Path(run_folder.make_run_folder()).parent == tmp_path
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with pytest.raises(ConfigError, match=r"no locks\); set TMPDIR to a folder that can"):
        run_folder.make_run_folder()


@pytest.mark.parametrize("lacks", ["f_bavail", "f_favail"])
def test_where_shared_memory_is_full_the_run_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    """A ring that cannot be made would end tracing before it began."""

    def statvfs(path: str) -> types.SimpleNamespace:
        found = {"f_bavail": 1 << 20, "f_frsize": 4096, "f_files": 1 << 20, "f_favail": 1 << 20}
        return types.SimpleNamespace(**found | ({lacks: 3} if path == "/dev/shm" else {}))

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = run_folder.make_run_folder()
    assert Path(folder).parent == tmp_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")  # to be ignored, by its standard
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    folder = run_folder.make_run_folder()
    assert Path(folder).parent == tmp_path / "temporary"


@pytest.mark.parametrize("name", ["no/such", "file"])
def test_a_run_folder_that_vanishes_or_is_none_ends_the_recording(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    recorder = RingRecorder(str(tmp_path / name))
    recorder.announce(PLAIN, 1, 1, 0, 1)
    recorder.spans(PLAIN)(1, 1, 0, 1, 2, [1])
    assert not recorder.open()
    assert caplog.records == []  # the run has ended: nothing to report


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_a_process_that_becomes_another_user_goes_on_untraced(tmp_path: Path) -> None:
    """And one that closes all descriptors, as daemons do: neither sees an error of the recorder."""
    script = f"""
import os
from sgl_aspects.tracing.records import SpanType
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
recorder = RingRecorder({str(tmp_path)!r})
assert recorder.open()
os.closerange(3, 64)
if os.fork() == 0:
    os.setuid(65534)
    for number in range(1, 4):
        recorder.spans(SpanType("s"))(number, 1, 0, 1, 2)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.wait()[1]))
recorder.close()
"""
    tmp_path.chmod(0o700)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "7\n"
    assert len(done.stderr.splitlines()) == 1
    assert "Permission denied" in done.stderr


def test_attaching_without_a_writable_folder_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", "/tmp")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ConfigError, match=r"no folder for its records.*Permission denied.*set TMPDIR"):
        attach(file=str(tmp_path / "traces.jsonl"))
    assert current() is None


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="needs a folder that not even root can write")
def test_attaching_without_a_forkable_collector_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper ends without having started the collector."""
    (tmp_path / "keeper.py").write_text("")
    monkeypatch.setattr("sgl_aspects.run.collector._KEEPER", str(tmp_path / "keeper.py"))
    with pytest.raises(ConfigError, match="collector cannot be started"):
        attach(file=str(tmp_path / "spans"))
    assert current() is None


def test_a_frozen_program_does_not_start_itself_as_its_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "program"))
    with pytest.raises(ConfigError, match=r"program is a frozen program.*SGL_ASPECTS_RECORDER=sdk"):
        attach(file=str(tmp_path / "spans"))
    assert current() is None


def test_a_package_in_an_archive_has_no_collector_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sgl_aspects.run.collector._KEEPER", "/app.pyz/sgl_aspects/run/keeper.py")
    with pytest.raises(ConfigError, match=r"app.pyz.* is in an archive; set SGL_ASPECTS_RECORDER=sdk"):
        attach(file=str(tmp_path / "spans"))
    assert current() is None


def test_an_engine_whose_run_folder_cannot_be_written_runs_untraced(tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    script = f"""
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
if __name__ == "__main__":
    with Engine(model_path={str(tmp_path / "model")!r}) as engine:
        answer = engine.generate([5, 6], SamplingParams(max_new_tokens=3, ignore_eos=True))
        print(answer.completion_tokens)
"""
    (tmp_path / "serve.py").write_text(script)
    ran = python(tmp_path / "serve.py", SGL_ASPECTS_TRACE="3", SGL_ASPECTS_TRACE_RUN="/sys/kernel")
    assert output_of(ran).split() == ["3"]
    # Once in each process, the scheduler's included.
    assert ran.stderr.count("tracing stops in process") == 2, ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forks_in_the_middle_of_spans_and_of_other_threads_work(tmp_path: Path) -> None:
    """Each child has a ring and ids of its own, nothing of it is in the parent's, and no lock is stuck."""
    recorder, stop = RingRecorder(str(tmp_path)), threading.Event()
    write, each = recorder.spans(PLAIN), 200
    named = recorder.spans(SpanType("named", {"text": str}))

    def work(thread: int) -> None:
        number = 0
        while not stop.is_set() and number < 4000:
            number += 1
            write(thread << 32 | number, 1, 1, 1, 2, [number])
            named(recorder.new_id(), 1, 1, 1, 2, [f"text {number % 50}"])  # takes locks

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    children = []
    for child in range(100, 110):
        recorder.announce(PLAIN, child, child, 0, 1)
        process_id = os.fork()
        if process_id == 0:
            code = 1
            try:
                for number in range(1, each + 1):
                    write(child << 32 | number, 1, 1, 1, 2, [number])
                    named(recorder.new_id(), 1, 1, 1, 2, [f"text {number % 50}"])
                recorder.close()
                code = 0
            finally:
                os._exit(code)
        children.append(process_id)
        write(child, child, 0, 1, 2, [child])
    stop.set()
    for thread in threads:
        thread.join()
    assert [os.waitpid(process_id, 0)[1] for process_id in children] == [0] * len(children)
    recorder.close()
    reader = RunReader(str(tmp_path))
    records = [record for record in read_all(reader) if isinstance(record, SpanEnd)]
    assert (reader.damaged, reader.dropped) == (0, 0)
    assert len(reader.writers) == 1 + len(children)
    ids = Counter(record.span_id for record in records)
    assert max(ids.values()) == 1
    for child in range(100, 110):
        assert ids[child] == 1
        assert all(ids[child << 32 | number] for number in range(1, each + 1))
    assert all(record.values[0] for record in records)
    reader.close()


def test_a_child_that_lives_on_does_not_keep_its_parent_s_ring_alive(tmp_path: Path) -> None:
    """Whether it was forked or is another program: the lock is the parent's alone."""
    script = f"""
import os, subprocess, sys, time
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
recorder = RingRecorder({str(tmp_path)!r})
recorder.open()
program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
child = os.fork()
if not child:
    print(os.getpid(), program.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        try:
            (path,) = tmp_path.glob("*.ring")
            ring = RingReader(path, read_only=True)
            assert ring.is_alive()
            parent.kill()
            parent.wait(60)
            assert all(is_running(child) for child in children)
            assert not ring.is_alive()
            ring.close()
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)


def test_a_closed_ring_has_ended_even_if_its_memory_is_still_in_use(tmp_path: Path) -> None:
    """A thread that is just writing, a cycle that is not collected yet: nothing comes any more."""
    recorder = RingRecorder(str(tmp_path))
    recorder.open()
    held = recorder.steps.memory
    (path,) = tmp_path.glob("*.ring")
    with contextlib.closing(RingReader(path, read_only=True)) as ring:
        assert ring.is_alive()
        assert ring.detaching_ns == 0
        recorder.detaching()
        began = ring.detaching_ns
        assert 0 < began <= ring.now_ns()
        recorder.detaching()  # as it is closed
        assert ring.detaching_ns == began
        recorder.close()
        assert not ring.is_alive()
    assert held is not None


@pytest.mark.parametrize("keeps_all", [False, True])
def test_a_run_of_more_processes_than_files_may_be_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_all: bool
) -> None:
    """Each is read to its end; only the latest rings of dead processes stay, unless all are to be kept."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (70, 70))
    for number in range(1, 41):
        recorder = RingRecorder(str(tmp_path))
        recorder.spans(PLAIN)(number, number, 0, 1, 2, [number])
        recorder.close()
    open_before = len(os.listdir("/proc/self/fd"))
    reader = RunReader(str(tmp_path), keeps_all=keeps_all)
    found, ended, is_done = [], 0, False
    while not is_done:
        found += [record.span_id for _, record in poll(reader) if isinstance(record, SpanEnd)]
        ended += len(reader.take_ended())
        is_done = not reader.has_more
        assert len(os.listdir("/proc/self/fd")) < open_before + 20
    assert sorted(found) == [*range(1, 41)]
    assert (ended, reader.writers, reader.damaged, reader.dropped) == (40, {}, 0, 0)
    assert len([*tmp_path.glob("*.ring")]) == (40 if keeps_all else 3)
    reader.close()
