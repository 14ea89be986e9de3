"""Private names of other packages, each used here alone; tests/test_compat.py tells when one has moved."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any


def weak_methods(function: types.FunctionType) -> list[Any]:
    """The `weakref.WeakMethod` objects for methods of ``function``."""
    references = weakref.getweakrefs(function)
    held = gc.get_referrers(*references) if references else ()
    return [holder for holder in held if isinstance(holder, weakref.WeakMethod)]


def retarget_weak_method(weak_method: Any, function: types.FunctionType) -> None:
    """Let ``weak_method`` be one of ``function``."""
    weak_method._func_ref = weakref.ref(function, weak_method._func_ref.__callback__)
