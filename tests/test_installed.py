"""The wheels in empty environments, and what type checkers find after an editable install."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.attachable import python_of
from tests.support.builds import is_compiled, sources
from tests.support.processes import finished, output_of
from tests.support.tree import ROOT

pytestmark = pytest.mark.slow

_RECORDS = """
from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
import os, sgl_aspects.runtime.server_args, sgl_aspects.platforms.identity, sys, tempfile
print(native.state())
with tempfile.TemporaryDirectory() as folder:
    recorder = RingRecorder(folder)
    assert recorder.open()
    recorder.close()
    assert os.listdir(folder)
assert sgl_aspects.__file__.startswith(sys.prefix), sgl_aspects.__file__
"""


def run(*words: str | Path, cwd: Path, **environment: str) -> str:
    without = ("PYTHONPATH", "PYTHONHOME")
    return output_of(finished(*words, cwd=cwd, seconds=280, without=without, variables=environment))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, sources(out), cwd=out)
    return next(out.glob("*.tar.gz"))


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_the_wheel_works_in_an_empty_environment(
    version: str, switch: str, sdist: Path, tmp_path: Path
) -> None:
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no CPython {version} here")
    made, environment = tmp_path / "wheels", tmp_path / "environment"
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    run(python, "-m", "venv", environment, cwd=tmp_path)
    own = environment / "bin"
    run(
        own / "python", *pip, "wheel", "--no-deps", "-w", made, sdist, cwd=tmp_path, SGL_ASPECTS_NATIVE=switch
    )
    (wheel,) = made.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl") == (switch == "off")
    run(own / "python", *pip, "install", wheel, cwd=tmp_path)
    state = run(own / "python", "-c", _RECORDS, cwd=tmp_path).strip()
    compiled = is_compiled(environment)
    assert state.startswith("in use" if compiled else "not in use: it was not built for this Python")
    assert f"compiled step path: {state}" in run(own / "sgl-aspects", "version", cwd=tmp_path)
    assert f"compiled step path: {state}" in run(own / "sgl-aspects", "doctor", cwd=tmp_path)
    shutil.copy(ROOT / "examples" / "first_hook.py", tmp_path)
    assert "ATTACH TRACE REPLACE" in run(own / "python", "first_hook.py", cwd=tmp_path)


_PLUGIN = """\
import sgl_aspects as aspects
from sgl_aspects.runtime import Engine

handle: int = aspects.weave(aspects.HookSource)
engine: int = Engine
"""


def test_type_checkers_find_the_package_after_an_editable_install(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(_PLUGIN)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "plugin.py"]
    mypy = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert 'has type "Handle", variable has type "int"' in mypy.stdout, mypy.stdout
    assert "import-not-found" not in mypy.stdout
    pyright = shutil.which("pyright") or shutil.which("npx")
    if pyright is None:
        pytest.skip("neither pyright nor npx is installed: only mypy was tested")
    words = [] if pyright.endswith("pyright") else ["--yes", "pyright"]
    done = finished(pyright, *words, "--pythonpath", sys.executable, "plugin.py", cwd=tmp_path, seconds=280)
    if "plugin.py" not in done.stdout:
        pytest.skip(f"pyright could not be fetched: {done.stderr[-200:]}")
    assert 'Type "Handle" is not assignable to declared type "int"' in done.stdout
    assert "could not be resolved" not in done.stdout
