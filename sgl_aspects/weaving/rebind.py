"""Rebinding: every holder of an old object gets the new one, in one pass over all pairs at once.

`from X import f`, registries, default arguments, closures, partials, class attributes and bound methods on
instances keep the object that stood in X when they were made. Three steps, each only for what the one
before left over, because each costs about ten times more:

1. count: an object with no reference but its home and ours has no other holder, and nothing is scanned;
2. module dictionaries, looked up by id;
3. everything the garbage collector knows.

What cannot be changed (tuples, C holders) is returned as :class:`Stale`.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_aspects.weaving.places import current, namespace


@dataclass(frozen=True)
class Stale:
    """A holder that still has the object from before.

    :param target: the object that it holds, by name.
    :param holder: what holds it, described.
    """

    target: str
    holder: str


@dataclass(frozen=True)
class Pair:
    """Holders of ``old`` shall hold ``new``.

    :param extra: how many references to ``old`` are unaccounted for; below zero where that is unknown.
    :param keep: ids of what goes on holding ``old`` (see keeping.py): containers, or (namespace, name).
    """

    old: Any
    new: Any
    extra: int = -1
    keep: frozenset[Any] = frozenset()


def rebind(pairs: Iterable[Pair], ours: Container[int]) -> list[Stale]:
    """Replace ``old`` by ``new`` in every holder; returns the holders that could not be changed.

    :param ours: ids of containers that hold an old object on purpose.
    """
    wanted = {id(pair.old): pair for pair in pairs if pair.extra != 0}
    if not wanted:
        return []
    found = _rebind_modules(wanted)
    left = [pair for key, pair in wanted.items() if not 0 <= pair.extra <= found.get(key, 0)]
    return _Collected(left, ours).rebind() if left else []


def _rebind_modules(wanted: dict[int, Pair]) -> dict[int, int]:
    found: dict[int, int] = {}
    for module in list(sys.modules.values()):
        names = namespace(module)
        if names.get("__name__", "").startswith("sgl_aspects.weaving"):
            continue
        # A list first: another thread may be importing into this module.
        for name, value in list(names.items()):
            pair = wanted.get(id(value))
            if pair is not None and pair.old is value:
                if not pair.keep.isdisjoint((id(names), (id(names), name))):
                    continue
                names[name] = pair.new
                found[id(value)] = found.get(id(value), 0) + 1
    return found


class _Collected:
    """Step three: holders found through the garbage collector."""

    def __init__(self, pairs: Sequence[Pair], ours: Container[int]) -> None:
        self.pairs = {id(pair.old): pair for pair in pairs}
        self.ours = ours
        self.kept: frozenset[Any] = frozenset().union(*(pair.keep for pair in pairs))
        self.stale: list[Stale] = []

    def rebind(self) -> list[Stale]:
        olds = [pair.old for pair in self.pairs.values()]
        own = {id(self.pairs), id(olds), id(self.__dict__), *(id(p) for p in self.pairs.values())}
        indirect: list[Any] = []
        for holder in _referrers(olds):
            if id(holder) in own or id(holder) in self.ours or _belongs_to_weaver(holder):
                continue
            if id(holder) in self.kept:
                continue
            if isinstance(holder, (dict, tuple, types.MethodType)) and not self._is_module_namespace(holder):
                indirect.append(holder)
            else:
                self._replace_in(holder)
        if indirect:
            self._rebind_indirect(indirect)
        return self.stale

    def _is_module_namespace(self, holder: Any) -> bool:
        if not isinstance(holder, dict) or "__name__" not in holder:
            return False
        module = sys.modules.get(holder["__name__"]) if isinstance(holder["__name__"], str) else None
        return module is not None and namespace(module) is holder

    def _new(self, value: Any) -> Any:
        """What shall stand where ``value`` stands; ``value`` itself where it is none of the old ones."""
        pair = self.pairs.get(id(value))
        return pair.new if pair is not None and pair.old is value else value

    def _is_old(self, value: Any) -> bool:
        pair = self.pairs.get(id(value))
        return pair is not None and pair.old is value

    # -- holders that can be changed where they are ---------------------------------------------------

    def _replace_in(self, holder: Any) -> None:
        if isinstance(holder, list):
            for index, value in enumerate(holder):
                if self._is_old(value):
                    holder[index] = self._new(value)
        elif isinstance(holder, set):
            for value in [value for value in holder if self._is_old(value)]:
                holder.discard(value)
                holder.add(self._new(value))
        elif isinstance(holder, types.CellType):
            if not _is_class_cell(holder):
                holder.cell_contents = self._new(holder.cell_contents)
        elif isinstance(holder, functools.partial):
            _replace_in_partial(holder, self._new(holder.func))
            self._report_old(holder.args, holder)
        elif isinstance(holder, dict):
            self._replace_in_dict(holder)
        elif isinstance(holder, type):
            self._replace_in_class(holder)
        elif isinstance(holder, _SILENT) or holder is sys.modules:
            pass
        else:
            self._replace_in_instance(holder)

    def _replace_in_dict(self, holder: dict[Any, Any]) -> None:
        for key, value in list(holder.items()):
            if self._is_old(value):
                holder[key] = self._new(value)
            if self._is_old(key):
                self._report(key, f"a key of a dictionary of {len(holder)} entries")

    def _replace_in_class(self, holder: type) -> None:
        # Through setattr: a write into the raw dictionary would leave CPython's method cache as it was.
        for name, value in list(type.__dict__["__dict__"].__get__(holder).items()):
            if self._is_old(value):
                type.__setattr__(holder, name, self._new(value))
            elif isinstance(value, (staticmethod, classmethod)) and self._is_old(value.__func__):
                type.__setattr__(holder, name, type(value)(self._new(value.__func__)))

    def _replace_in_instance(self, holder: Any) -> None:
        if isinstance(holder, (staticmethod, classmethod)):
            return self._rebind_indirect([holder])
        if isinstance(holder, functools.cached_property):
            holder.func = self._new(holder.func)
            return None
        changed = False
        for name, value in list(namespace(holder).items()):
            if self._is_old(value):
                namespace(holder)[name] = self._new(value)
                changed = True
        for name in _slots(type(holder)):
            value = getattr(holder, name, None)
            if self._is_old(value):
                object.__setattr__(holder, name, self._new(value))
                changed = True
        if isinstance(holder, types.FunctionType):
            changed = True  # its defaults, dictionary and closure are holders of their own
        if not changed:
            self._report_referents(holder)
        return None

    # -- holders that are changed through what holds them ----------------------------------------------

    def _rebind_indirect(self, holders: list[Any]) -> None:
        """Dictionaries of classes, default arguments, bound methods and descriptors."""
        known = {id(holder): holder for holder in holders}
        owners: dict[int, list[Any]] = {}
        for owner in _referrers(holders):
            if owner is known or isinstance(owner, types.FrameType):
                continue
            for referent in gc.get_referents(owner):
                if id(referent) in known:
                    owners.setdefault(id(referent), []).append(owner)
        for holder in holders:
            self._replace_through(holder, owners.get(id(holder), []))

    def _replace_through(self, holder: Any, owners: list[Any]) -> None:
        owners = [owner for owner in owners if id(owner) not in self.ours and not _belongs_to_weaver(owner)]
        if isinstance(holder, dict):
            classes = [owner for owner in owners if isinstance(owner, type)]
            for cls in classes:
                self._replace_in_class(cls)
            if not classes:
                self._replace_in_dict(holder)
        elif isinstance(holder, tuple):
            functions = [f for f in owners if isinstance(f, types.FunctionType) and f.__defaults__ is holder]
            for function in functions:
                function.__defaults__ = tuple(self._new(value) for value in holder)
            linearised = [cls for cls in owners if isinstance(cls, type) and _is_of_class(holder, cls)]
            if len(functions) + len(linearised) < len(owners):
                self._report_old(holder, holder)
        else:
            self._replace_object(holder, owners)

    def _replace_object(self, holder: Any, owners: list[Any]) -> None:
        """``holder`` is immutable: make it anew around the new function, and put that in its holders."""
        if not self._is_old(holder.__func__):
            return  # a bound method *of* an old object, such as a link of a chain
        if isinstance(holder, types.MethodType):
            anew: Any = types.MethodType(self._new(holder.__func__), holder.__self__)
        else:
            anew = type(holder)(self._new(holder.__func__))
        if owners:
            self.stale += _Collected([Pair(holder, anew)], self.ours).rebind()

    # -- what stays --------------------------------------------------------------------------------------

    def _report(self, old: Any, holder: str) -> None:
        stale = Stale(describe(old), holder)
        if stale not in self.stale:
            self.stale.append(stale)

    def _report_old(self, values: Iterable[Any], holder: Any) -> None:
        for value in values:
            if self._is_old(value):
                self._report(value, _describe(holder))

    def _report_referents(self, holder: Any) -> None:
        if self._is_old(type(holder)):
            self._report(type(holder), "instances that were made before")
        else:
            self._report_old(gc.get_referents(holder), holder)


def _referrers(objects: list[Any]) -> Iterator[Any]:
    """Everything the garbage collector knows that holds one of ``objects``."""
    # A tuple of our own: Python 3.13 would find the one that it makes for the call.
    arguments = tuple(objects)
    for holder in gc.get_referrers(*arguments):
        if holder is not objects and holder is not arguments:
            yield holder


def describe(obj: Any) -> str:
    """A function or class by the name it was defined under."""
    inner = getattr(obj, "__func__", None) or getattr(obj, "fget", None) or obj
    return f"{getattr(inner, '__module__', '?')}:{getattr(inner, '__qualname__', repr(inner))}"


_SILENT = (types.FrameType, types.GetSetDescriptorType, types.MemberDescriptorType)
"""A frame keeps what its call began with; the descriptors of a class belong to it."""


def _is_class_cell(cell: types.CellType) -> bool:
    """Whether ``cell`` is what `super()` looks into: it belongs to the class, whatever stands for that."""
    if not isinstance(cell.cell_contents, type):
        return False
    closures = [holder for holder in gc.get_referrers(cell) if isinstance(holder, tuple)]
    for function in _referrers(closures):
        if isinstance(function, types.FunctionType):
            for name, held in zip(function.__code__.co_freevars, function.__closure__ or ()):
                if held is cell:
                    return name == "__class__"
    return False


def _is_of_class(holder: tuple[Any, ...], cls: type) -> bool:
    return holder is cls.__mro__ or holder is type.__dict__["__bases__"].__get__(cls)


def _replace_in_partial(holder: functools.partial[Any], function: Any) -> None:
    state: list[Any] = list(holder.__reduce__()[2])
    state[0] = function
    holder.__setstate__(tuple(state))  # type: ignore[attr-defined]


def _slots(cls: type) -> list[str]:
    return [
        name
        for base in cls.__mro__
        for name, value in type.__dict__["__dict__"].__get__(base).items()
        if isinstance(value, types.MemberDescriptorType)
        and current(base, "__slots__") is not None
        and base.__flags__ & (1 << 9)  # a class made in Python: C members may be read-only
    ]


def _belongs_to_weaver(holder: Any) -> bool:
    return type(holder).__module__.startswith("sgl_aspects.weaving")


def _describe(holder: Any) -> str:
    if isinstance(holder, (tuple, frozenset)):
        return f"a {type(holder).__name__} of {len(holder)}"
    return f"a {type(holder).__module__}.{type(holder).__qualname__}"
