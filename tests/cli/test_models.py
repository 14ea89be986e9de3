"""The model that comes in a wheel: fetched, checked, cached, and never half there.

Small packages stand for the real one: pip finds them in a folder (PIP_FIND_LINKS) instead of an index.
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from sgl_aspects.cli.models import SMOLLM2, PackagedModel, ensure_model
from sgl_aspects.errors import AspectsError, ModelLoadError
from tests.support.processes import free_port
from tests.support.workers import fetch_model

CONTENT = bytes(range(256)) * 5000


def make_wheel(folder: Path, content: bytes = CONTENT) -> PackagedModel:
    """A wheel ``tiny-model`` 1.0 in ``folder``, and its description."""
    member = "tiny_model/tiny.gguf"
    files = {
        member: content,
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "tiny_model-1.0.dist-info/RECORD": b"",
    }
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return PackagedModel(
        name="Tiny",
        distribution="tiny-model",
        version="1.0",
        wheel_size=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=member,
        member_size=len(content),
        member_sha256=hashlib.sha256(content).hexdigest(),
    )


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which pip looks; the cache is empty."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def files_below(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_fetched_once_and_then_taken_from_the_cache(links: Path, tmp_path: Path) -> None:
    model = make_wheel(links)
    path = ensure_model(model)
    assert path.read_bytes() == CONTENT
    assert path.name == "tiny.gguf"
    before = path.stat().st_mtime_ns
    (links / "tiny_model-1.0-py3-none-any.whl").unlink()  # no second fetch could succeed
    assert ensure_model(model) == path
    assert path.stat().st_mtime_ns == before
    assert files_below(tmp_path / "cache") == ["sgl-aspects/models/tiny-model-1.0/tiny.gguf"]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[: len(data) // 2], id="truncated"),
        pytest.param(lambda data: b"\xff" + data[1:], id="one byte changed"),
        pytest.param(lambda data: data[:0], id="empty"),
    ],
)
def test_a_damaged_file_is_fetched_again(links: Path, damage: Callable[[bytes], bytes]) -> None:
    model = make_wheel(links)
    path = ensure_model(model)
    path.write_bytes(damage(path.read_bytes()))
    output = io.StringIO()
    assert ensure_model(model, console=Console(file=output, width=400)) == path
    assert path.read_bytes() == CONTENT
    assert "is damaged: fetching it again" in output.getvalue()


def test_pip_is_not_imported_from_the_current_folder(
    links: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_wheel(links)
    (tmp_path / "pip.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert ensure_model(model).read_bytes() == CONTENT
    assert not (tmp_path / "mark").exists()


def test_a_wheel_with_another_hash_is_refused(links: Path, tmp_path: Path) -> None:
    model = make_wheel(links)
    make_wheel(links, content=CONTENT[::-1])
    with pytest.raises(ModelLoadError, match="HASHES") as caught:
        ensure_model(model)
    assert "--model DIR" in str(caught.value)
    assert files_below(tmp_path / "cache") == []


def test_processes_that_fetch_at_once_all_get_the_whole_file(links: Path, tmp_path: Path) -> None:
    model = make_wheel(links)
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        answers = pool.map(fetch_model, [model] * 3, chunksize=1)
    assert answers == [model.member_sha256] * 3
    assert files_below(tmp_path / "cache") == ["sgl-aspects/models/tiny-model-1.0/tiny.gguf"]


def test_no_network_and_no_cache_is_one_clear_error(links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(links.iterdir())
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_port()}/simple")
    with pytest.raises(AspectsError) as caught:
        ensure_model(SMOLLM2)
    message = str(caught.value)
    assert "SmolLM2-135M-Instruct is not in the cache" in message
    assert "could not connect" in message
    assert "--model DIR" in message
    assert "Retry(" not in message
    assert "\n" not in message


def test_a_cache_folder_that_cannot_be_written_is_an_error(links: Path, tmp_path: Path) -> None:
    model = make_wheel(links)
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ModelLoadError, match=r"Set XDG_CACHE_HOME .* --model DIR") as caught:
        ensure_model(model)
    assert str(tmp_path / "cache") in str(caught.value)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_on_a_terminal_pip_shows_its_progress(
    is_terminal: bool, links: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = io.StringIO()
    ensure_model(make_wheel(links), console=Console(file=output, force_terminal=is_terminal, width=100))
    assert "Fetching Tiny (1 MB) from the package index" in output.getvalue()
    assert ("tiny_model-1.0" in capfd.readouterr().err) == is_terminal


def test_nothing_names_an_index() -> None:
    source = Path(ensure_model.__code__.co_filename).read_text()
    assert "://" not in source
    assert "index-url" not in source
    assert "PIP_" not in source
    assert os.sep not in SMOLLM2.file_name
