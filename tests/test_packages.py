"""Hints about packages that are missing name the packages, in one form."""

from __future__ import annotations

import re
from pathlib import Path

from sgl_aspects import packages
from tests.support.processes import python
from tests.support.tree import PACKAGE, ROOT, modules, written


def test_the_command_has_the_versions_that_are_needed() -> None:
    assert packages.install_command("textual", "flag-gems") == "pip install 'textual>=1.0' flag-gems"


def test_a_hint_names_the_extra_that_brings_the_same() -> None:
    assert packages.hint("textual", "llguidance", "flag-gems").endswith(
        "flag-gems (extras of sgl-aspects: view, json)"
    )
    assert packages.hint("flag-gems") == "pip install flag-gems"


def test_what_is_missing_from_extras_is_known_without_the_checkout(tmp_path: Path) -> None:
    """``serve`` includes ``runtime`` and ``json``; nothing of them is on the path here, but for rich."""
    info = tmp_path / "sgl_aspects-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sgl-aspects\nVersion: 1.0\nRequires-Dist: wrapt\n"
        'Requires-Dist: torch>=2.6; extra == "runtime"\nRequires-Dist: rich>=13.9; extra == "runtime"\n'
        'Requires-Dist: llguidance>=1.3; extra == "json"\n'
        'Requires-Dist: sgl-aspects[runtime,json]; extra == "serve"\n'
        'Requires-Dist: uvicorn>=0.34; python_version >= "3.10" and extra == "serve"\n'
    )
    rich = tmp_path / "rich-14.0.dist-info"
    rich.mkdir()
    (rich / "METADATA").write_text("Metadata-Version: 2.1\nName: rich\nVersion: 14.0\n")
    (tmp_path / "packages.py").symlink_to(PACKAGE / "packages.py")
    program = "import packages; print(packages.install_command(*packages.missing('serve')))"
    done = python("-S", "-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout == "pip install 'torch>=2.6' 'llguidance>=1.3' 'uvicorn>=0.34'\n"


def test_no_hint_stands_elsewhere_or_names_sgl_aspects_on_an_index() -> None:
    """Nobody has registered the name: what pip would find under it could be anybody's."""
    faults = []
    for _, path in modules():
        for line, text in written(path):
            if "pip install" in text and path.stem not in ("packages", "new_platform"):
                faults.append(f"{path}:{line}: {text}")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.tmpl")]
    for page in pages:
        found = re.findall(r"pip install [^\n`]*(?<=[\s'\"])sgl-aspects(?:\[|\s|$).*", page.read_text())
        faults += [f"{page}: {line}" for line in found]
    assert not faults, "\n".join(faults)
