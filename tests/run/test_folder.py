"""The folder of a run: its collector, and what is left of it when all was killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from sgl_aspects.run import clock
from sgl_aspects.run.cleaning import STAYING, remove_dead_runs
from sgl_aspects.run.collector import (
    collector_settings,
    collector_state,
    forget_collector_settings,
    how_to_start,
    keep_collector_settings,
    take_run,
)
from sgl_aspects.run.control import run_control
from sgl_aspects.run.folder import CLOSING, hold_run, make_run_folder, remove_run_folder, woven_ns
from tests.support.processes import is_running


def fork_to_take(run_folder: Path) -> int:
    """Fork a process that makes itself the run's collector; gives its id."""
    if process_id := os.fork():
        return process_id
    try:
        take_run(str(run_folder))
        time.sleep(60)
    finally:
        os._exit(1)


def test_a_run_whose_collector_is_alive_names_its_process(tmp_path: Path) -> None:
    """Also in the moment in which one takes the run over: never 0, or the id of the one before."""
    for _ in range(40):
        taker = fork_to_take(tmp_path)
        while (state := collector_state(tmp_path)) is None or not state.is_alive:
            assert is_running(taker)
        os.kill(taker, signal.SIGKILL)
        os.waitpid(taker, 0)
        assert state.process_id == taker


def test_a_run_that_is_being_closed_takes_no_further_process(tmp_path: Path) -> None:
    hold = hold_run(str(tmp_path))
    assert hold is not None
    (tmp_path / CLOSING).touch()
    assert hold_run(str(tmp_path)) is None
    hold.close()


KEPT = {"SGL_ASPECTS_TRACE_KEEP": "1"}


def killed_run(parent: Path, number: int, settings: Mapping[str, str] = {}, *, ended: bool = False) -> Path:
    """A run whose collector was killed an hour ago."""
    folder = parent / f"run-{number}"
    folder.mkdir()
    keep_collector_settings(str(folder), {"OTEL_SERVICE_NAME": "mine", **settings})
    taker = fork_to_take(folder)
    while (state := collector_state(folder)) is None or not state.is_alive:
        assert is_running(taker)
    os.kill(taker, signal.SIGKILL)
    os.waitpid(taker, 0)
    if ended:
        forget_collector_settings(str(folder))
    make_old(folder)
    return folder


def test_a_collector_that_is_started_again_gets_its_variables_but_no_secret(tmp_path: Path) -> None:
    given = {
        "SGL_ASPECTS_CONTROL_FROM": "/etc/levels.json",
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=x",
        "PATH": "/bin",
    }
    keep_collector_settings(str(tmp_path), given)
    assert collector_settings(str(tmp_path)) == {
        "SGL_ASPECTS_CONTROL_FROM": "/etc/levels.json",
        "OTEL_EXPORTER_OTLP_HEADERS": None,
    }
    said = how_to_start(tmp_path)
    assert said.startswith(
        "set OTEL_EXPORTER_OTLP_HEADERS, which are not saved, and start it again with cd / && "
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '"x"', "[" * 100_000])
def test_of_damaged_settings_a_collector_starts_with_those_of_its_environment(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "collector.json").write_text(text)
    assert collector_settings(str(tmp_path)) == {}
    assert how_to_start(tmp_path).startswith("start it again")


def make_old(folder: Path) -> None:
    hour_ago = time.time() - 3600
    os.utime(folder, (hour_ago, hour_ago))


def test_of_killed_runs_the_latest_stay(tmp_path: Path) -> None:
    folders = [killed_run(tmp_path, number) for number in range(STAYING + 3)]
    remove_dead_runs(folders)
    assert [folder for folder in folders if folder.exists()] == folders[3:]


def test_a_run_whose_collector_died_before_it_took_it_is_removed_too(tmp_path: Path) -> None:
    oldest = tmp_path / "oldest"
    oldest.mkdir()
    keep_collector_settings(str(oldest), {"OTEL_SERVICE_NAME": "mine"})
    make_old(oldest)
    remove_dead_runs([oldest, *(killed_run(tmp_path, number) for number in range(STAYING))])
    assert not oldest.exists()


@pytest.mark.parametrize(
    "why", ["recorded in", "kept", "ended in order", "just killed", "without a collector"]
)
def test_other_runs_are_left_alone(tmp_path: Path, why: str) -> None:
    oldest = killed_run(tmp_path, 0, KEPT if why == "kept" else {}, ended=why == "ended in order")
    held = hold_run(str(oldest)) if why == "recorded in" else None
    make_old(oldest)
    if why == "just killed":
        os.utime(oldest)
    if why == "without a collector":
        remove_run_folder(str(oldest))
        oldest = Path(make_run_folder())
        make_old(oldest)
    remove_dead_runs([oldest, *(killed_run(tmp_path, number + 1) for number in range(STAYING))])
    assert oldest.exists()
    if held is not None:
        held.close()
    remove_run_folder(str(oldest))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["clock", "control", "woven"])
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_runs_small_files_are_neither_waited_for_nor_followed(tmp_path: Path, name: str, kind: str) -> None:
    """`sgl-aspects top` reads them, also as root of another user's run."""
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    assert abs(clock.unix_ns(tmp_path) - time.time_ns()) < 10**10
    assert run_control(str(tmp_path)) is None
    assert woven_ns(tmp_path) == 0.0


def test_a_run_is_not_held_through_a_link(tmp_path: Path) -> None:
    """It would be cut to one byte."""
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    run.mkdir()
    (run / "held").symlink_to(precious)
    assert hold_run(str(run)) is None
    assert precious.read_text() == "precious"
