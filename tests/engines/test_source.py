"""Reading in an engine's source, without running it, which roles it has."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_aspects.cli.main import main
from sgl_aspects.engines import SGLANG, fingerprints
from sgl_aspects.engines.base import AttributeReader, Engine, Role
from sgl_aspects.engines.source import Source
from sgl_aspects.errors import ConfigError
from tests.support.distributions import install, wheel

MODULES = {
    "engine/__init__.py": "raise SystemExit('this was run')",
    "engine/base.py": "class Outputs:\n    def stream(self): ...\n",
    "engine/loop.py": """
from engine.base import Outputs as Base
try:
    import torch
except ImportError:
    def fallback(): ...
class Loop(Base):
    "\\("
    if True:
        async def step(self): ...
    alias = step
""",
    "engine/again.py": "from engine.loop import Loop\nclass Last(Loop):\n    def deep(self): ...\n",
}


@pytest.fixture(params=["wheel", "folder"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    if request.param == "folder":
        for name, text in MODULES.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return Source(tmp_path)
    return Source(wheel(tmp_path, "engine-1.2-py3-none-any.whl", MODULES))


@pytest.mark.parametrize(
    ("target", "is_there"),
    [
        ("engine.loop:Loop.step", True),
        ("engine.loop:Loop.alias", True),
        ("engine.loop:Loop.stream", True),  # inherited, through an import under another name
        ("engine.again:Loop.stream", True),  # the class itself is imported
        ("engine.loop:fallback", True),
        ("engine.loop:Loop", True),
        ("engine.loop:Loop.missing", False),
        ("engine.loop:missing", False),
        ("engine.gone:Loop.step", False),
        ("engine.*:*oop.step", True),
        ("engine.**:Out*.stream", True),
        ("engine.*:Out*.step", False),
        ("other.*:Loop.step", False),
        ("engine.base:Outputs+.stream", True),
        ("engine.base:Outputs+.step", True),  # of a subclass
        ("engine.base:Outputs+.deep", True),  # of a subclass's subclass
        ("engine.base:Outputs+.fallback", False),
        ("engine.base:Outputs+", True),
        ("engine.base:Gone+.step", False),
    ],
)
def test_a_target_is_found_where_it_would_be_at_run_time(source: Source, target: str, is_there: bool) -> None:
    assert source.defines(target) is is_there


def test_the_first_alternate_that_exists_plays_the_role(source: Source) -> None:
    targets = ("engine.gone:f", "engine.loop:Loop.step", "engine.base:Outputs.stream")
    engine = Engine("engine", "engine", {"run_batch": Role(targets)})
    (found,) = source.find_roles(engine)
    assert found.target == "engine.loop:Loop.step"


def test_what_an_object_does_not_have_reads_as_none_and_costs_the_others_nothing() -> None:
    sources: dict[str, str | AttributeReader] = {
        "request.top_p": "sampling.top_p",
        "request.max_tokens": lambda request: len(request.ids),
        "request.group": "rid",
    }
    engine = Engine("engine", "engine", {}, sources)
    read = engine.values_reader("request", ("top_p", "max_tokens", "seed", "group"))
    whole = SimpleNamespace(sampling=SimpleNamespace(top_p=0.5), ids=[1, 2], rid="a")
    assert list(read(whole)) == [0.5, 2, None, "a"]
    assert list(read(SimpleNamespace(sampling=None, rid="b"))) == [None, None, None, "b"]
    assert list(read(None)) == [None] * 4


def test_the_doctor_names_roles_that_a_version_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler = {
        "sglang/srt/managers/scheduler.py": "class Scheduler:\n    def run_batch(self, batch): ...\n"
    }
    path = wheel(tmp_path, "sglang-9.9.9-py3-none-any.whl", scheduler)
    assert main(["doctor", "--engine", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "9.9.9" in printed
    assert "missing in 9.9.9: forward" in printed
    assert main(["doctor", "--json", "--engine", str(path)]) == 1
    roles = json.loads(capsys.readouterr().out)["9.9.9"]
    assert [role for role, target in roles.items() if target] == ["run_batch"]
    # The HTTP server, the tokenizers and what answers a router over gRPC are other packages.
    assert set(roles) == set(SGLANG.every_role) - {"exchange", "respond", "render_template", "receive_rpc"}


def test_a_file_other_than_a_wheel_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a wheel nor a folder"):
        Source(tmp_path / "gone.whl")


@pytest.mark.parametrize(
    ("module", "error"),
    [
        ("def f(a: pass", "m.mod cannot be parsed"),
        ("def f(a): pass\0", "m.mod cannot be parsed"),
        ("x = " + "-" * 100_000 + "1", "m.mod cannot be parsed"),
        ("#" + " " * (17 << 20), "m/mod.py is not a file of at most 16 MiB"),  # 17 KB in the wheel
    ],
    ids=["not Python", "a null byte", "nested", "a bomb"],
)
@pytest.mark.parametrize("kind", ["wheel", "folder"])
def test_a_hostile_module_is_an_error(tmp_path: Path, kind: str, module: str, error: str) -> None:
    files = {"m/__init__.py": "", "m/mod.py": module}
    if kind == "folder":
        (tmp_path / "m").mkdir()
        for name, text in files.items():
            (tmp_path / name).write_text(text)
    source = Source(tmp_path if kind == "folder" else wheel(tmp_path, "m-1-py3-none-any.whl", files))
    with pytest.raises(ConfigError, match=error):
        source.defines("m.mod:f")


def test_a_function_nested_more_deeply_than_python_recurses_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def f():\n    return " + "-" * 1500 + "1\n")
    with pytest.raises(ConfigError):
        fingerprints.lock("m:f", "h:f", "around", Source(tmp_path))


def test_a_damaged_wheel_is_an_error(tmp_path: Path) -> None:
    file = wheel(tmp_path, "m-1-py3-none-any.whl", {"m/__init__.py": "def f(): ..." * 9})
    whole = file.read_bytes()
    found: set[bool | None] = set()
    for position in range(len(whole)):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            found.add(Source(file).defines("m:f"))
        except ConfigError:
            found.add(None)
    assert None in found


@pytest.mark.timeout(60)
def test_a_pipe_or_an_endless_device_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m-1-py3-none-any.whl")
    with pytest.raises(ConfigError, match="neither a wheel nor a folder"):
        Source(tmp_path / "m-1-py3-none-any.whl")
    (tmp_path / "m").mkdir()
    (tmp_path / "m/__init__.py").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="is not a file of at most"):
        Source(tmp_path).defines("m:f")


def test_every_room_of_this_package_is_checked_against_a_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded engine's source is here; others are read where their wheels are."""
    assert main(["doctor", "--json", "--engine", str(Path(__file__).parents[2])]) == 0
    (columns,) = json.loads(capsys.readouterr().out).values()
    assert all(columns.values())
    assert columns["graph_launch"].endswith("DeviceGraph+.replay")


def test_an_engine_of_a_package_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "their_room.py").write_text(
        "from sgl_aspects.engines import Engine, Role\n"
        "ROLES = {'run_batch': Role(('engine.loop:Loop.step',), required=True)}\n"
        "ENGINE = Engine('theirs', 'theirs', ROLES)\n"
    )
    install(tmp_path, "their-room", "[sgl_aspects.engines]\ntheirs = their_room:ENGINE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = wheel(tmp_path, "engine-1.2-py3-none-any.whl", MODULES)
    assert main(["doctor", "--engine", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["theirs", "1.2"]


def test_every_engine_of_a_package_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = "sglang/multimodal_gen/runtime/managers"
    files = {
        "sglang/srt/managers/scheduler.py": "class Scheduler:\n    def run_batch(self, batch): ...\n",
        f"{images}/scheduler.py": "class Scheduler:\n    def _return_item_result(self): ...\n",
    }
    path = wheel(tmp_path, "sglang-9.9.9-py3-none-any.whl", files)
    main(["doctor", "--engine", str(path)])
    heads = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("9.9.9")]
    assert heads == ["sglang", "sglang-diffusion"]
    main(["doctor", "--json", "--engine", str(path)])
    roles = json.loads(capsys.readouterr().out)
    assert list(roles) == ["9.9.9", "sglang-diffusion 9.9.9"]
    assert [role for role, target in roles["sglang-diffusion 9.9.9"].items() if target] == [
        "end_scheduled_request"
    ]


def test_a_source_without_a_room_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = wheel(tmp_path, "other-1.2-py3-none-any.whl", {"other/__init__.py": ""})
    assert main(["doctor", "--engine", str(path)]) == 2
    assert "known engines: embedded, sglang" in capsys.readouterr().err
