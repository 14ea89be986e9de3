"""Which run a command is about: its folder or a process names it, and else all runs are listed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_aspects.cli.main import main
from sgl_aspects.run import clock
from sgl_aspects.tracing.collect import rings as collect_rings
from sgl_aspects.tracing.record.ring_recorder import RingRecorder

OTHER = 1  # a process that never records


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Two runs: one of this process that began three hours ago, one of a child that has ended."""
    made = [tmp_path / "mine", tmp_path / "other"]
    for folder in made:
        folder.mkdir()
        clock.begin(str(folder))
    os.utime(made[0] / "clock", (time.time() - 3 * 3600,) * 2)
    recorder = RingRecorder(str(made[0]), 1)
    assert recorder.open()
    if not (child := os.fork()):
        RingRecorder(str(made[1]), 1).open()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    monkeypatch.setattr(collect_rings, "runs", lambda: made)
    monkeypatch.chdir(tmp_path)
    yield made
    recorder.close()


def test_a_process_names_its_run(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    child = next(folders[1].glob("*.ring")).name.partition("-")[0]
    for words in (["--run", str(os.getpid())], ["--pid", str(os.getpid())], ["--run", str(folders[0])]):
        assert main(["control", *words]) == 0
        assert capsys.readouterr().out.startswith(f"process {os.getpid()}: level 1")
    assert main(["control", "--run", child]) == 0
    assert "(ended)" in capsys.readouterr().out
    assert main(["report", str(os.getpid())]) == 2
    assert f"{folders[0]} holds no spans" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--run", str(OTHER)], ["--pid", str(OTHER)]])
def test_for_a_process_that_records_nothing_the_runs_are_listed(
    folders: list[Path], capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["control", *words]) == 2
    first, *choices = capsys.readouterr().err.splitlines()
    assert f"no traced run of process {OTHER} found" in first
    assert choices[0].startswith(f"  - {folders[0]}, 3 h old, process {os.getpid()}: ")
    assert "pytest" in choices[0]
    assert choices[1].startswith(f"  - {folders[1]}, ")
    assert choices[1].endswith(": ended")


def test_several_live_runs_are_listed(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    recorder = RingRecorder(str(folders[1]), 1)
    assert recorder.open()
    try:
        for command in (["control"], ["report"], ["top", "--once"]):
            assert main(command) == 2
            first, *choices = capsys.readouterr().err.splitlines()
            assert "several runs are traced: name one, or a process of it" in first
            assert [choice.split(",")[0] for choice in choices] == [f"  - {folder}" for folder in folders]
    finally:
        recorder.close()


def test_of_containers_that_share_memory_each_sees_its_own_run(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Linux says 0 for the holder of a lock that has no id here. Its processes' ids are others' here."""
    (folders[1] / "collector.lock").touch()
    monkeypatch.setattr("sgl_aspects.run.collector.lock_holder", lambda _: 0)
    recorder = RingRecorder(str(folders[1]), 1)
    assert recorder.open()
    try:
        assert main(["control"]) == 0
        assert main(["control", "--run", str(os.getpid())]) == 0
        assert "collector" not in capsys.readouterr().out
        assert main(["control", "--run", str(folders[1])]) == 0
        assert "collector: in another container" in capsys.readouterr().out
        assert main(["control", "--run", str(OTHER)]) == 2
        assert capsys.readouterr().err.endswith(": of another container\n")
    finally:
        recorder.close()


def test_a_run_without_its_flag_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["control", "4711"])
    assert "unknown argument 4711; did you mean --run 4711?" in capsys.readouterr().err
