"""The backends: FlagGems as the default, the Triton kernels, vendors from folders and entry points.

A vendor is a package, or a folder, with a function ``register(registry)`` that registers its implementations:

    runtime/dispatch/vendors/<name>/__init__.py       with this package
    SGL_ASPECTS_OP_VENDOR_PATH=folder[:folder]        each folder in them that has an __init__.py
    entry points of group "sgl_aspects.operators"     "pkg.mod:register", of installed packages

Registering imports no vendor's library: an implementation reports by ``is_available`` whether it can run, and
imports the library at its first call.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from sgl_aspects import env
from sgl_aspects.errors import ConfigError, OperatorError
from sgl_aspects.runtime.dispatch import flaggems, triton
from sgl_aspects.runtime.dispatch.registry import OpRegistry

ENTRY_POINT_GROUP = "sgl_aspects.operators"
PATH_VARIABLE = "SGL_ASPECTS_OP_VENDOR_PATH"
_VENDORS = Path(__file__).parent / "vendors"


def register_backends(registry: OpRegistry) -> None:
    """Register all backends.

    :raises OperatorError: a backend failed to register; names it and the reason.
    """
    for who, load in _backends():
        try:
            load()(registry)
        except OperatorError as error:
            raise type(error)(f"{who}: {error}") from error
        except Exception as error:
            raise OperatorError(
                f"{who} failed while it registered its operators: {type(error).__name__}: {error}. "
                f"Repair or remove it."
            ) from error


def _backends() -> Iterator[tuple[str, Callable[[], Callable[[OpRegistry], None]]]]:
    """Yield each backend's name, and a function that imports it and returns its ``register``."""
    yield "the default backend, FlagGems", lambda: flaggems.register
    yield "the Triton kernels", lambda: triton.register
    for folder in _folders(_VENDORS):
        name = f"sgl_aspects.runtime.dispatch.vendors.{folder.name}:register"
        yield f"vendor {folder.name!r}", partial(pkgutil.resolve_name, name)
    for parent in filter(None, (env.text(PATH_VARIABLE) or "").split(os.pathsep)):
        if not Path(parent).is_dir():
            raise ConfigError(
                f"{PATH_VARIABLE}: {parent!r} is not a folder: name folders that hold vendors' folders"
            )
        for folder in _folders(Path(parent)):
            yield f"vendor folder {folder}", partial(_load_folder, folder)
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        package = f" of {point.dist.name} {point.dist.version}" if point.dist is not None else ""
        yield f"entry point {point.name!r}{package} ({point.value})", point.load


def _folders(parent: Path) -> list[Path]:
    found = [path.parent for path in sorted(parent.glob("*/__init__.py"))]
    return [path for path in found if not path.name.startswith((".", "_"))]


def _load_folder(folder: Path) -> Any:
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
    return module.register
