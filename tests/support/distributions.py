"""Installed packages with entry points, as pip leaves them."""

from __future__ import annotations

import zipfile
from pathlib import Path


def install(folder: Path, name: str, entry_points: str, version: str = "1.0") -> Path:
    """Install a distribution into ``folder``; return its file of entry points."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    file = info / "entry_points.txt"
    file.write_text(entry_points)
    return file


def install_plugin(folder: Path, name: str, code: str, group: str = "sgl_aspects.plugins") -> None:
    """Install a distribution with one module, whose ``activate`` is a plugin of this group."""
    (folder / f"{name}.py").write_text(code)
    install(folder, name, f"[{group}]\n{name} = {name}:activate\n")


def wheel(folder: Path, name: str, modules: dict[str, str]) -> Path:
    """Write a wheel that holds these files, and nothing else."""
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for module, text in modules.items():
            archive.writestr(module, text)
    return path
