"""Counting references: is there any holder besides the home of an object and ourselves?

Scanning a process for holders costs milliseconds; asking for a reference count costs nothing. What we hold
ourselves is measured on a stand-in of the same kind that goes through the same steps.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from sgl_aspects.weaving.joinpoint import JoinPoint
from sgl_aspects.weaving.places import Place, current

_baselines: dict[tuple[bool, bool], int] = {}


def extra_references(point: Any) -> int:
    """How many references to what stands at ``point`` now have no known holder; -1 where nobody can tell."""
    if not isinstance(point, JoinPoint) or type(point.original) is not types.FunctionType:
        return -1
    if point.place.inherited or not getattr(sys, "_is_gil_enabled", lambda: True)():
        return -1
    if current(point.place.owner, point.place.name) is not point.standing:
        return -1  # it does not stand at home, so that the home does not count
    return max(_count(point) - _baseline(point), 0)


def _count(point: JoinPoint) -> int:
    return sys.getrefcount(point.replacement if point.installed else point.original)


def _baseline(point: JoinPoint) -> int:
    applied = point.woven.applied
    key = (point.installed, applied)
    if key not in _baselines:
        _baselines[key] = _measure(*key)
    return _baselines[key]


def _measure(installed: bool, applied: bool) -> int:
    home = types.ModuleType("stand_in")
    exec("def f(): pass", home.__dict__)
    point = JoinPoint(Place(home, "f", home.__dict__["f"]))
    if applied:
        point.refresh()
    if installed:
        point.home.move_in("", point.woven.function)
        point.installed = True
    return _count(point)
