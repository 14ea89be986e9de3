"""The backends: FlagGems as the default, vendors from folders and entry points.

A vendor is a package, or a folder, with a function ``register(registry)`` that registers its implementations:

    runtime/dispatch/vendors/<name>/__init__.py       with this package
    SGL_ASPECTS_OP_VENDOR_PATH=folder[:folder]        each folder in them that has an __init__.py
    entry points of group "sgl_aspects.operators"     "pkg.mod:register", of installed packages

Registering imports no vendor's library: an implementation says in ``is_available`` whether it is there, and
imports it when it is first called.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from sgl_aspects import env
from sgl_aspects.errors import ConfigError, OperatorError
from sgl_aspects.runtime.dispatch import flaggems
from sgl_aspects.runtime.dispatch.registry import OpRegistry

ENTRY_POINT_GROUP = "sgl_aspects.operators"
PATH_VARIABLE = "SGL_ASPECTS_OP_VENDOR_PATH"
_VENDORS = Path(__file__).parent / "vendors"


def register_backends(registry: OpRegistry) -> None:
    """:raises OperatorError: a backend failed to register; says which and why."""
    _register("the default backend, FlagGems", flaggems.register, registry)
    for folder in _folders(_VENDORS):
        module = importlib.import_module(f"sgl_aspects.runtime.dispatch.vendors.{folder.name}")
        _register(f"vendor {folder.name!r}", module.register, registry)
    for parent in (env.text(PATH_VARIABLE) or "").split(os.pathsep):
        if not parent:
            continue
        if not Path(parent).is_dir():
            raise ConfigError(
                f"{PATH_VARIABLE}: {parent!r} is no folder: name folders that hold vendors' folders"
            )
        for folder in _folders(Path(parent)):
            _register(f"vendor folder {folder}", _load_folder(folder), registry)
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        package = f" of {point.dist.name} {point.dist.version}" if point.dist is not None else ""
        _register(f"entry point {point.name!r}{package} ({point.value})", _load_entry_point(point), registry)


def _folders(parent: Path) -> list[Path]:
    found = [path.parent for path in sorted(parent.glob("*/__init__.py"))]
    return [path for path in found if not path.name.startswith((".", "_"))]


def _load_entry_point(point: Any) -> Callable[[OpRegistry], None]:
    return lambda registry: point.load()(registry)


def _load_folder(folder: Path) -> Callable[[OpRegistry], None]:
    def register(registry: OpRegistry) -> None:
        name = f"sgl_aspects_vendor_{folder.name}"
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]  # as `import` does
            raise
        module.register(registry)

    return register


def _register(who: str, register: Callable[[OpRegistry], None], registry: OpRegistry) -> None:
    try:
        register(registry)
    except OperatorError as error:
        raise type(error)(f"{who}: {error}") from error
    except Exception as error:
        raise OperatorError(
            f"{who} failed while it registered its operators: {type(error).__name__}: {error}. "
            f"Repair or remove it."
        ) from error
