"""Files with what was recorded are for their user alone, whatever the umask."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sgl_aspects.cli.main import main
from sgl_aspects.files import write_private
from sgl_aspects.tracing import attach
from tests.support.other_user import NOBODY, Shared, shared_folders
from tests.support.sessions import begin


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_traces_pages_and_dumps_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold prompts where these are recorded."""
    file, timeline, dump = tmp_path / "traces.jsonl", tmp_path / "trace.json", tmp_path / "dump.jsonl"
    monkeypatch.setenv("SGL_ASPECTS_TRACE_PERFETTO_FILE", str(timeline))
    with attach(file=str(file), exporters=["otlp-json-file", "perfetto"]) as session:
        begin(session, "r")()
        assert (
            main(["dump", "--run", session.run_folder, "--format", "otlp-json", "--output", str(dump)]) == 0
        )
    page = tmp_path / "report.html"
    assert main(["report", str(file), "-o", str(page)]) == 0
    assert {path.name: _mode(path) for path in (file, timeline, dump, page)} == dict.fromkeys(
        ("traces.jsonl", "trace.json", "dump.jsonl", "report.html"), 0o600
    )


def test_a_program_that_is_run_begins_a_private_file(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    process_id = os.fork()
    if not process_id:
        try:
            main(["run", f"--file={file}", "--", "true"])
        finally:
            os._exit(1)
    assert os.waitpid(process_id, 0)[1] == 0
    assert _mode(file) == 0o600


def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    file.touch(mode=0o640)
    with attach(file=str(file)) as session:
        begin(session, "r")()
    assert _mode(file) == 0o640


def test_a_file_is_written_beside_no_link_of_a_known_name(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    (tmp_path / f".control-{os.getpid()}").hardlink_to(_made(precious))
    write_private(tmp_path / "control", b"new")
    assert precious.read_bytes() == b"old"
    assert (tmp_path / "control").read_bytes() == b"new"
    assert _mode(tmp_path / "control") == 0o600


def _made(path: Path) -> Path:
    path.write_bytes(b"old")
    return path


@pytest.fixture
def folders() -> Iterator[Shared]:
    if os.geteuid() != 0:
        pytest.skip("giving files to another user needs root")
    with shared_folders() as found:
        yield found


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("file", f"user {NOBODY}'s; name another file"),
        ("link", "another user's link"),
        ("pipe", f"user {NOBODY}'s; name another file"),
        ("hard link", "another user may have given it this one"),
        ("hard link to a link", "another user's link"),
    ],
)
def test_a_file_whose_name_another_user_took_is_not_written(
    kind: str, told: str, folders: Shared, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The others would read what is recorded, or root's file be lost; not every kernel forbids it in /tmp."""
    precious, named = _made(folders.ours / "precious"), folders.theirs / "traces.jsonl"
    if kind == "pipe":
        os.mkfifo(named)
    elif kind == "hard link":
        named.hardlink_to(precious)
    elif kind == "hard link to a link":
        os.chown(folders.theirs, 0, 0)  # as /tmp is root's
        folders.theirs.chmod(0o1777)
        (folders.ours / "link").symlink_to(precious)
        os.link(folders.ours / "link", named, follow_symlinks=False)
    else:
        named.symlink_to(precious) if kind == "link" else _made(named)
    if "hard link" not in kind:
        os.chown(named, NOBODY, NOBODY, follow_symlinks=False)
    spans = tmp_path / "spans.jsonl"
    with attach(file=str(spans)) as session:
        begin(session, "r")()
        assert main(["dump", "--run", session.run_folder, "--output", str(named)]) == 2
    assert main(["report", str(spans), "-o", str(named)]) == 2
    assert main(["run", f"--file={named}", "--", "true"]) == 2
    assert main(["conformance", "--only", "identity", "--json", str(named)]) == 2
    printed = capsys.readouterr().err
    assert printed.count(told) == 4
    assert (named if kind == "file" else precious).read_bytes() == b"old"


def test_the_demo_makes_no_file_through_another_users_link(
    folders: Shared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("time.strftime", lambda _: "at-a-time-that-can-be-guessed")
    link, nologin = folders.theirs / "demo-at-a-time-that-can-be-guessed.otlp.jsonl", folders.ours / "nologin"
    link.symlink_to(nologin)
    os.lchown(link, NOBODY, NOBODY)
    assert main(["demo", "--output", str(folders.theirs), "--model", str(folders.ours)]) == 2
    assert "another user's link" in capsys.readouterr().err
    assert not nologin.exists()


def test_a_link_of_ones_own_is_followed(tmp_path: Path) -> None:
    (tmp_path / "latest.jsonl").symlink_to(tmp_path / "first.jsonl")
    with attach(file=str(tmp_path / "latest.jsonl")) as session:
        begin(session, "r")()
    assert (tmp_path / "first.jsonl").read_text()
