"""Targets that are not there: for now or for good, and in which words to say so."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from typing import Any

from sgl_aspects.weaving.places import current, is_class, namespace
from sgl_aspects.weaving.targets import Alternate, Target


def waiting(target: Target) -> str:
    """What a hook on ``target`` waits for before anything that it names has loaded."""
    if target.has_module_pattern:
        return "no loaded module has what the pattern names yet"
    return "its module is not loaded yet"


def for_good(alternate: Alternate, name: str, module: Any) -> bool:
    """Whether nothing that loads later can bring what ``alternate`` does not find in ``module``."""
    if alternate.has_module_pattern:
        return False
    if alternate.module is not None:
        return True
    search_path = namespace(module).get("__path__")
    if search_path is None:
        return True
    following = f"{name}.{alternate.path[name.count('.') + 1]}"
    if following in sys.modules:
        return False  # a longer reading of the target speaks for itself
    # importlib.util.find_spec() might import and wake what is on the way.
    return PathFinder.find_spec(following, search_path) is None


def what_is_there(path: tuple[str, ...], name: str, module: Any) -> str:
    """A sentence on what ``module`` has instead of ``path``, with names that are close."""
    import difflib  # only here: it is slow to import

    names = [key for key in namespace(module) if not key.startswith("__")]
    close = difflib.get_close_matches(path[0], names, n=3)
    within = f"{name}.{path[0]}"
    if len(path) > 1 and within in sys.modules:
        return f"{within} is a module: write '{within}:{'.'.join(path[1:])}'"
    if path[0] in names:
        owner = current(module, path[0])
        names = [key for key in dir(owner) if not key.startswith("__")] if is_class(owner) else []
        close = [f"{path[0]}.{key}" for key in difflib.get_close_matches(path[-1], names, n=3)]
    hint = f"; close names: {', '.join(close)}" if close else ""
    return f"module {name} is loaded and has no {'.'.join(path)}{hint}"
