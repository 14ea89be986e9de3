"""What goes on holding an original that is replaced, because it calls the original on purpose.

`from engine import f` in the module of a REPLACE hook, a closure, a default argument or an attribute of the
hook: would rebinding reach those, the hook would call itself for ever. And a class that replaces another one
has holders in its own right, which must not get the old class when the new one is taken away.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from sgl_aspects.weaving.hooks import Advice, HookType
from sgl_aspects.weaving.places import is_class, namespace

Kept = frozenset[Any]
"""Ids of containers that are left alone as a whole, and pairs of a namespace's id and one name in it."""

_CONTAINERS = (list, dict, set, types.CellType)


def kept_by(advices: Iterable[Advice]) -> Kept:
    """What the hooks of ``advices`` hold of their own: for REPLACE hooks, their modules too."""
    kept: set[Any] = set()
    for advice in advices:
        kept.update(id(holder) for holder in _holders_in(advice.hook))
        if advice.hook_type is HookType.REPLACE:
            home = _home_of(advice.hook)
            if home is not None:
                kept.add(id(home))
    return frozenset(kept)


def give_back(hook: Any, standing: Any, original: Any) -> None:
    """Let a hook that is about to replace ``original`` hold it, where it was given what stands there now.

    A class that derives from the one that stands there means that one, and keeps it.
    """
    if is_class(hook) and is_class(standing) and issubclass(hook, standing):
        return
    home = _home_of(hook)
    # Where it was defined, it is no copy.
    if home is not None and home.get("__name__") != getattr(standing, "__module__", None):
        for name in [name for name, value in list(home.items()) if value is standing]:
            home[name] = original
    for holder in _holders_in(hook):
        if isinstance(holder, types.CellType) and holder.cell_contents is standing:
            holder.cell_contents = original


def _home_of(hook: Any) -> dict[str, Any] | None:
    """The namespace of the module that ``hook`` was defined in; None where it is not loaded."""
    module = sys.modules.get(getattr(hook, "__module__", None) or "")
    return namespace(module) if module is not None else None


def _holders_in(hook: Any) -> Iterator[Any]:
    """Only what lives as long as the hook does: what is kept is known by its id."""
    yield hook
    if isinstance(hook, types.FunctionType):
        held = (hook.__closure__, hook.__defaults__, hook.__kwdefaults__, hook.__dict__)
        yield from (holder for holder in held if holder is not None)
        yield from hook.__closure__ or ()
        if "__wrapped__" in hook.__dict__:
            yield from _holders_in(hook.__dict__["__wrapped__"])
    elif isinstance(hook, types.MethodType):
        yield from _holders_in(hook.__func__)
        yield hook.__self__
        if not is_class(hook.__self__):
            yield namespace(hook.__self__)
    elif isinstance(hook, functools.partial):
        yield from _holders_in(hook.func)
    elif is_class(hook):
        for member in namespace(hook).values():
            for function in _functions_of(member):
                yield from _holders_in(function)
    else:
        yield namespace(hook)


def _functions_of(member: Any) -> Iterator[types.FunctionType]:
    if isinstance(member, (classmethod, staticmethod)):
        member = member.__func__
    parts = (member.fget, member.fset, member.fdel) if isinstance(member, property) else (member,)
    yield from (part for part in parts if isinstance(part, types.FunctionType))


class OwnHolders:
    """What holds a class before it replaces another one."""

    def __init__(self, cls: type) -> None:
        namespaces = {id(namespace(module)) for module in list(sys.modules.values())}
        # Strong references, so that no other container can get the id of one of them.
        self._containers: list[Any] = []
        kept: set[Any] = set()
        for holder in gc.get_referrers(cls):
            if id(holder) in namespaces:
                kept.update((id(holder), name) for name, value in list(holder.items()) if value is cls)
            elif isinstance(holder, _CONTAINERS):
                self._containers.append(holder)
                kept.add(id(holder))
        self.kept: Kept = frozenset(kept)
