"""``sgl-aspects new-platform NAME``: a small, complete, installable package for a new device."""

from __future__ import annotations

import argparse
import keyword
import os
from importlib.resources import files
from pathlib import Path
from string import Template

from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms.builtins import BUILTIN_PLATFORMS

#: The templates, and the path for each; ``$package`` is the package's folder.
TEMPLATES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "__init__.py": "$package/__init__.py",
    "device.py": "$package/device.py",
    "platform.py": "$package/platform.py",
    "operators.py": "$package/operators.py",
    "hooks.py": "$package/hooks.py",
    "sglang.py": "$package/sglang.py",
    "sglang_multimodal.py": "$package/sglang_multimodal.py",
    "test_platform.py": "tests/test_$name.py",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the platform's name, as SGLANG_PLATFORM takes it: acme")
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="where to write it; by default ./NAME-platform"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the package. ConfigError for an invalid name, and for a folder that is not empty."""
    name = check_name(arguments.name)
    folder = Path(os.path.expanduser(arguments.output or f"{name.replace('_', '-')}-platform"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: name another folder with --output")
    written = write_package(name, folder)
    for file in written:
        print(f"wrote {file}")
    here = folder if folder.is_absolute() else os.path.join(os.curdir, folder)  # a bare name is the index's
    print(
        f"\npip install {here}\nsgl-aspects platforms\nsgl-aspects conformance --platform {name}\n"
        f"python -m pytest {folder / 'tests'}"
    )
    return 0


def check_name(name: str) -> str:
    """Return ``name`` if it is valid for a platform: it becomes part of Python names."""
    if not name.isidentifier() or not name.isascii() or not name.islower() or keyword.iskeyword(name):
        raise ConfigError(f"{name!r}: a platform's name is lower-case letters, digits and _, as in Python")
    if name in {row.name for row in BUILTIN_PLATFORMS} | {"native"}:
        raise ConfigError(f"{name!r} is built in: a platform of yours needs a name of its own")
    return name


def write_package(name: str, folder: Path) -> list[Path]:
    """Write the package of platform ``name`` to ``folder``; returns the files."""
    values = {
        "name": name,
        "package": f"{name}_platform",
        "distribution": f"{name.replace('_', '-')}-platform",
        "class_name": "".join(part.capitalize() for part in name.split("_")),
    }
    templates = files("sgl_aspects.cli") / "vendor_template"
    written = []
    for template, target in TEMPLATES.items():
        file = folder / Template(target).substitute(values)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = (templates / f"{template}.tmpl").read_text(encoding="utf-8")
        file.write_text(Template(text).substitute(values), encoding="utf-8")
        written.append(file)
    return written
