"""Folders and links of another user, where root writes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_aspects import isolated
from sgl_aspects.cli.main import main
from sgl_aspects.errors import ConfigError
from sgl_aspects.run.collector import collector_state, how_to_start
from sgl_aspects.run.folder import make_run_folder, remove_run_folder
from sgl_aspects.run.requests import prepare_from_environment
from sgl_aspects.tracing import attach
from tests.support.other_user import NOBODY, Shared, shared_folders
from tests.support.sessions import begin


@pytest.fixture
def folders() -> Iterator[Shared]:
    if os.geteuid() != 0:
        pytest.skip("giving files to another user needs root")
    with shared_folders() as found:
        yield found


@pytest.fixture
def ring(folders: Shared) -> Path:
    """The only ring of another user's run."""
    run = folders.theirs / "run"
    with attach(file=str(folders.ours / "traces.jsonl")) as session:
        begin(session, "r")()
        (ring,) = Path(session.run_folder).glob("*.ring")
        run.mkdir()
        (run / ring.name).write_bytes(ring.read_bytes())
    give_away(run)
    return run / ring.name


def give_away(folder: Path) -> None:
    for path in (folder, *folder.iterdir()):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def test_root_does_not_change_another_users_run(ring: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = ring.read_bytes()
    assert main(["control", "--run", str(ring.parent), "--level", "1"]) == 2
    assert "or another user's (run the command as that user)" in capsys.readouterr().err
    assert ring.read_bytes() == before
    assert [path.name for path in ring.parent.iterdir()] == [ring.name]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "what", ["a ring", "a pipe", "a folder", "a link to root's ring", "root's, that others may write"]
)
@pytest.mark.parametrize(
    "words",
    [
        "dump --run RUN",
        "top --once --run RUN",
        "control --run RUN",
        "report RUN",
        "usage RUN",
        "why slowest RUN",
    ],
)
def test_root_reads_no_record_that_another_user_may_have_written(
    words: str, what: str, ring: Path, folders: Shared, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records are decoded by marshal, which hostile data can crash."""
    if what != "a ring":
        moved = ring.rename(folders.ours / "ring")
        if what == "a pipe":
            os.mkfifo(ring)
        elif what == "a folder":
            ring.mkdir()
        elif what == "a link to root's ring":
            ring.symlink_to(moved)
        else:
            ring.write_bytes(moved.read_bytes())
            ring.chmod(0o666)
        if not what.startswith("root's"):
            give_away(ring.parent)
    assert main(words.replace("RUN", str(ring.parent)).split()) == 2
    assert "none of its rings can be read" in capsys.readouterr().err


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["collector.lock", "collector.json"])
def test_root_does_not_wait_for_a_pipe_in_another_users_run(ring: Path, name: str) -> None:
    (ring.parent / "collector.lock").write_text("1")
    (ring.parent / name).unlink(missing_ok=True)
    os.mkfifo(ring.parent / name)
    give_away(ring.parent)
    assert main(["control", "--run", str(ring.parent)]) == 2
    assert str(collector_state(ring.parent)) in ("not running", "None")
    assert how_to_start(ring.parent).startswith("start it again")


@pytest.mark.parametrize("settings", ['{"OTEL_\\u001b]0;owned\\u0007": null}', "[1]", "{"])
@pytest.mark.parametrize("lock", ["1", "one"])
def test_root_is_not_told_what_another_users_run_says_of_its_collector(
    ring: Path, settings: str, lock: str
) -> None:
    (ring.parent / "collector.json").write_text(settings)
    (ring.parent / "collector.lock").write_text(lock)
    give_away(ring.parent)
    state = collector_state(ring.parent)
    assert state is None or str(state) == "not running"
    assert how_to_start(ring.parent).startswith("start it again")


def test_root_opens_no_link_as_a_ring(ring: Path, folders: Shared) -> None:
    ring.rename(folders.ours / "ring")
    ring.symlink_to(folders.ours / "ring")
    give_away(ring.parent)
    os.chown(folders.ours / "ring", 0, 0)
    assert main(["control", "--run", str(ring.parent)]) == 2


def test_root_collects_no_run_of_another_user(ring: Path, folders: Shared) -> None:
    """Its settings would name root's files, and its lock is a link to one."""
    kept = folders.ours / "kept"
    kept.write_text("precious " * 9)
    settings = {"OTEL_TRACES_EXPORTER": "otlp-json-file", "ASPECTS_TRACE_FILE": str(kept)}
    (ring.parent / "collector.json").write_text(json.dumps(settings))
    (ring.parent / "collector.lock").symlink_to(kept)
    give_away(ring.parent)
    command = isolated.python("sgl_aspects.collector", str(ring.parent))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"the run is user {NOBODY}'s: start its collector as that user" in done.stderr
    assert kept.read_text() == "precious " * 9
    assert ring.exists()


def test_root_asks_no_processes_behind_a_link_of_another_users(
    folders: Shared, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default folder has a known name in /dev/shm."""
    block = folders.ours / f"{2**40}"
    block.touch()
    link = folders.theirs / "sgl-aspects-prepared-0"
    link.symlink_to(folders.ours)
    give_away(folders.theirs)
    assert main(["ops", "--live", "--control", str(link)]) == 2
    assert "is not a folder of yours" in capsys.readouterr().err
    assert block.exists()


def test_no_process_takes_requests_from_a_link_of_another_users(
    folders: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = folders.theirs / "sgl-aspects-prepared-0"
    link.symlink_to(folders.ours)
    os.lchown(link, NOBODY, NOBODY)
    monkeypatch.setenv("SGL_ASPECTS_OP_CONTROL", str(link))
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}, with mode l"):
        prepare_from_environment()


def test_another_users_runtime_folder_is_not_used(
    folders: Shared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folders.theirs))
    monkeypatch.setattr("sgl_aspects.run.folder._has_room", lambda folder, _: folder != "/dev/shm")
    folder = make_run_folder()
    try:
        assert folders.theirs not in Path(folder).parents
    finally:
        remove_run_folder(folder)
