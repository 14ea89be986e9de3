"""Fake engines: modules written to a folder, imported like any module."""

from __future__ import annotations

import enum
import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import sgl_aspects
from tests.support.processes import python


class ForwardMode(enum.IntEnum):
    """Like SGLang's."""

    EXTEND = 1
    DECODE = 2


class Engine:
    """A folder on ``sys.path``; modules imported from it are removed when the test ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, path: str, source: str = "") -> Path:
        """Write a module, and an empty ``__init__`` for each package on the way that has none."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        for package in list(file.relative_to(self.folder).parents)[:-1]:
            marker = self.folder / package / "__init__.py"
            if not marker.exists():
                marker.write_text("")
        file.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return file

    def load(self, name: str) -> Any:
        """Import a module."""
        return importlib.import_module(name)

    def modules(self) -> list[str]:
        """The names of all loaded modules that come from here."""
        return [name for name, module in list(sys.modules.items()) if self._is_ours(module)]

    def forget(self) -> None:
        """Take all modules of this folder out of ``sys.modules``."""
        for name in self.modules():
            del sys.modules[name]

    def _is_ours(self, module: ModuleType) -> bool:
        try:
            names = object.__getattribute__(module, "__dict__")
        except AttributeError:
            return False
        spec = names.get("__spec__")
        places = [names.get("__file__"), getattr(spec, "origin", None), *_search_path(names.get("__path__"))]
        return any(str(place).startswith(str(self.folder)) for place in places if place)

    def run(self, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run ``script`` in a process of its own that can import from this folder."""
        root = Path(sgl_aspects.__file__).parents[1]
        path = os.pathsep.join([str(self.folder), str(root)])
        return python(
            "-W",
            "error",
            "-c",
            textwrap.dedent(script),
            **environment,
            PYTHONPATH=path,
            PYTHONDONTWRITEBYTECODE="1",
        )


def _search_path(path: Any) -> list[str]:
    return list(path) if isinstance(path, list) else list(getattr(path, "_path", ()))
