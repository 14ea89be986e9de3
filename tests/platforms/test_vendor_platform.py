"""Vendors' packages, built and installed with pip into a fresh environment: the example, and two new ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from sgl_aspects.cli.main import main
from sgl_aspects.errors import ConfigError
from tests.support.processes import finished, output_of
from tests.support.sessions import read_file
from tests.support.tiny_models import make_llama

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


class Environment:
    """A virtual environment that sees this one's packages, and has its own where new ones are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder, with_pip=False)
        self.python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
        paths = {"base": str(folder), "platbase": str(folder)}
        self.site = Path(sysconfig.get_path("purelib", vars=paths))
        ours = sysconfig.get_path("purelib")
        (self.site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n{ROOT}\n")

    def run(
        self, *words: str, platform: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        env = {"CUDA_VISIBLE_DEVICES": "", **environment}
        if platform is not None:
            env["SGLANG_PLATFORM"] = platform
        without = ("SGLANG_PLATFORM", "PYTHONPATH")
        return finished(self.python, *words, cwd=self.folder, seconds=280, without=without, variables=env)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example and what ``new-platform`` writes for acme and bolt."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("acme", "bolt"):
        assert main(["new-platform", name, "--output", str(folder / name)]) == 0
    shutil.copytree(ROOT / "examples/vendor_platform", folder / "loopback")
    return folder


@pytest.fixture(scope="module")
def environment(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("environment"))
    install = ["-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    output_of(made.run(*install, *(str(packages / name) for name in ("acme", "bolt", "loopback"))))
    return made


def test_a_new_package_passes_its_own_tests_unchanged(environment: Environment, packages: Path) -> None:
    tests = packages / "acme" / "tests"
    done = environment.run(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tests), str(tests)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b[45]\d passed", done.stdout), done.stdout


def test_conformance_of_the_installed_example(environment: Environment, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = environment.run(
        *("-m", "sgl_aspects", "conformance", "--platform", "loopback"),
        *("--only", "identity,memory,distributed,generation", "--reference", "float64"),
        *("--json", str(report)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    read = json.loads(report.read_text())
    assert read["device"] == "Loopback L100"
    assert read["counts"]["failed"] == read["counts"]["skipped"] == 0


GENERATE = """
import sys
from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.tracing import attach

if __name__ == "__main__":
    session = attach(file=sys.argv[2], exporters=["otlp-json-file"])
    with Engine(model_path=sys.argv[1], max_total_tokens=512) as engine:
        result = engine.generate([5, 6, 7], SamplingParams(max_new_tokens=6, ignore_eos=True))
    session.detach()
    assert len(result.output_ids) == 6
"""


def test_the_traced_runtime_generates_on_it(environment: Environment, tmp_path: Path) -> None:
    make_llama(tmp_path / "model")
    script = tmp_path / "generate.py"
    script.write_text(GENERATE)
    traces = tmp_path / "traces.jsonl"
    done = environment.run(
        *(str(script), str(tmp_path / "model"), str(traces)), platform="loopback", SGL_ASPECTS_TRACE_LEVEL="3"
    )
    assert done.returncode == 0, done.stderr
    spans = [*read_file(traces)]
    forwards = [span.attributes for span in spans if span.name == "forward"]
    assert len(forwards) >= 6
    assert {forward["sgl_aspects.device.name"] for forward in forwards} == {"loopback"}
    assert any(forward.get("sgl_aspects.forward.device_time", 0) > 0 for forward in forwards)


@pytest.mark.parametrize("name", ["Acme", "9to5", "class", "a-b", "", "cuda", "native"])
def test_names_that_a_platform_cannot_have(name: str, tmp_path: Path) -> None:
    from sgl_aspects.cli.new_platform import check_name

    with pytest.raises(ConfigError, match=repr(name)):
        check_name(name)


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("mine")
    assert main(["new-platform", "acme", "--output", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_what_is_written_is_clean(packages: Path) -> None:
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length", "110"]
    output_of(finished(*ruff, "--select", "E,F,W,B,UP", str(packages / "acme")))
