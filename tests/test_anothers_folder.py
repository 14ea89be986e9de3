"""Folders and links of another user, where root writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_aspects.cli.main import main
from sgl_aspects.errors import ConfigError
from sgl_aspects.run.folder import make_run_folder, remove_run_folder
from sgl_aspects.runtime.dispatch.live import folder_of_environment, prepare_folder
from sgl_aspects.tracing import attach
from tests.support.other_user import NOBODY, Shared, shared_folders
from tests.support.sessions import begin


@pytest.fixture
def folders() -> Iterator[Shared]:
    if os.geteuid() != 0:
        pytest.skip("giving files to another user needs root")
    with shared_folders() as found:
        yield found


def test_root_does_not_change_another_users_run(folders: Shared, capsys: pytest.CaptureFixture[str]) -> None:
    run = folders.theirs / "run"
    with attach(file=str(folders.ours / "traces.jsonl")) as session:
        begin(session, "r")()
        (ring,) = Path(session.run_folder).glob("*.ring")
        run.mkdir()
        (run / ring.name).write_bytes(ring.read_bytes())
    for path in (run, run / ring.name):
        os.chown(path, NOBODY, NOBODY)
    before = (run / ring.name).read_bytes()
    assert main(["control", "--run", str(run), "--level", "1"]) == 2
    assert "or another user's (run the command as that user)" in capsys.readouterr().err
    assert (run / ring.name).read_bytes() == before
    assert [path.name for path in run.iterdir()] == [ring.name]


def test_a_folder_of_operators_is_not_a_link_of_another_users(folders: Shared) -> None:
    link = folders.theirs / "sgl-aspects-operators-0"
    link.symlink_to(folders.ours)
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="is not a folder of yours"):
        prepare_folder(link)


def test_another_users_runtime_folder_is_not_used(
    folders: Shared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folders.theirs))
    monkeypatch.setattr("sgl_aspects.run.folder._has_room", lambda folder: folder != "/dev/shm")
    folder = make_run_folder()
    try:
        assert folders.theirs not in Path(folder).parents
        assert folders.theirs not in folder_of_environment().parents
    finally:
        remove_run_folder(folder)
