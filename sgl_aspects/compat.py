"""Private names of other packages, each used here alone; tests/test_compat.py tells when one has moved."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any


def weak_methods(function: types.FunctionType) -> list[Any]:
    """The `weakref.WeakMethod` objects for methods of ``function``."""
    references = weakref.getweakrefs(function)
    held = gc.get_referrers(*references) if references else ()
    return [holder for holder in held if isinstance(holder, weakref.WeakMethod)]


def retarget_weak_method(weak_method: Any, function: types.FunctionType) -> None:
    """Let ``weak_method`` be one of ``function``."""
    weak_method._func_ref = weakref.ref(function, weak_method._func_ref.__callback__)


def watch_torchscript(frontend: Any, compiled: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``compiled`` with each function that `torch.jit` parses; the function returned undoes it.

    :param frontend: the module `torch.jit.frontend`, whose functions look `parse_def` up in it.
    """
    parse_def = getattr(frontend, "parse_def", None)
    if parse_def is None:
        return lambda: None

    @functools.wraps(parse_def)
    def parse(function: Any) -> Any:
        compiled(function)
        return parse_def(function)

    def undo() -> None:
        if frontend.parse_def is parse:
            frontend.parse_def = parse_def

    frontend.parse_def = parse
    return undo
