"""The package as setup.py builds it, for other interpreters and in other surroundings."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from tests.support.processes import finished, output_of
from tests.support.tree import ROOT


def sources(folder: Path) -> Path:
    """Copy what a build reads: it writes there, too, so that two of one folder would disturb each other."""
    checkout = folder / "checkout"
    checkout.mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, checkout)
    for name in ("sgl_aspects", "platforms", "runtime"):
        compiled = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=compiled)
    return checkout


def build(python: str, folder: Path, **environment: str) -> Path:
    """Build the package for ``python`` with this environment's setuptools; return the folder for its path."""
    words = ("setup.py", "--quiet", "build", "--build-base", "build")
    variables = {"PYTHONPATH": sysconfig.get_path("purelib"), "SGL_ASPECTS_NATIVE": "on", **environment}
    output_of(finished(python, *words, cwd=sources(folder), variables=variables))
    (built,) = folder.glob("checkout/build/lib*")
    return built


def is_compiled(folder: Path) -> bool:
    """Return whether the step path was compiled for this build."""
    return any(folder.rglob("_decode_path.*.so"))
