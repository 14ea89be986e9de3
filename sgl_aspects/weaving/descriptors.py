"""Descriptors: taking the callable out of an attribute, putting a woven one back in, and the slot it is in.

A plain Python function, bare or inside a classmethod, staticmethod, property or cached_property, becomes a
woven function inside a new descriptor of the same type. Everything else that can be called gets a proxy.

Types are asked by `type()`, never by `isinstance`: somebody else's proxy says it is what it wraps.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import reprlib
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sgl_aspects.errors import HookError
from sgl_aspects.weaving.attributes import (
    MISSING,
    AttributeReference,
    current,
    derives,
    found_after,
    is_class,
)
from sgl_aspects.weaving.functions import WovenFunction
from sgl_aspects.weaving.proxies import WovenProxy, bound_late
from sgl_aspects.weaving.rebinding import rebuilt

# -- opening an attribute ------------------------------------------------------------------------------------

Rebuild = Callable[[Mapping[str, Any]], Any]
Woven = WovenFunction | WovenProxy


@dataclass(frozen=True)
class Opened:
    """An attribute taken apart.

    :param content: the callable in it.
    :param called: what calling it comes down to: ``content``, or a function that binds it first.
    :param rebuild: makes the attribute anew with other callables in it, by part; "" but for properties.
    """

    content: Any
    called: Callable[..., Any]
    rebuild: Rebuild

    def weave(self, place: str) -> Woven:
        """A stand-in for ``content`` that can be steered."""
        if type(self.content) is types.FunctionType:
            return WovenFunction(self.content)
        return WovenProxy(self.content, self.called, place)


def open_attribute(place: AttributeReference) -> Opened:
    """Take apart what stands at ``place``.

    :raises HookError: there is nothing in it that can be called, or nothing that can be put in its stead.
    """
    opened = _open(place)
    is_shadow = place.inherited and is_class(place.owner) and not place.binds_to_owner
    return dataclasses.replace(opened, called=_next_in_line(opened, place)) if is_shadow else opened


def _open(place: AttributeReference) -> Opened:
    raw = place.raw
    if is_class(raw):
        raise HookError(
            f"{place} is a class, and a class takes only REPLACE with a class; "
            f"to hook its calls use '{place}.__init__' or another of its methods"
        )
    if place.binds_to_owner:
        return _open_for_owner(place)
    if issubclass(type(raw), (classmethod, staticmethod)):
        kind = classmethod if issubclass(type(raw), classmethod) else staticmethod
        opened = _opened(place, raw.__func__, lambda woven: rebuilt(raw, kind, woven))
        binds = isinstance(raw, classmethod) and sys.version_info < (3, 13)
        return _late(opened, place) if binds else opened
    if issubclass(type(raw), property):
        return _open_property(place)
    if issubclass(type(raw), functools.cached_property):
        return _opened(place, raw.func, lambda woven: rebuilt(raw, functools.cached_property, woven))
    if isinstance(raw, (functools.partialmethod, functools.singledispatchmethod)):
        return Opened(raw, bound_late(raw, place.owner), lambda woven: woven[""])
    if is_class(place.owner) and not callable(raw) and _only_binds(raw):
        return Opened(raw, bound_late(raw, place.owner), lambda woven: woven[""])
    _check_new(place)
    opened = _opened(place, raw, lambda woven: woven)
    return _late(opened, place) if is_class(place.owner) else opened


def _opened(place: AttributeReference, content: Any, rebuild: Callable[[Any], Any]) -> Opened:
    if not callable(content):
        raise HookError(
            f"{place} is {type(content).__name__} {reprlib.repr(content)}, "
            "which cannot be called, so not hooked"
        )
    return Opened(content, content, lambda woven: rebuild(woven[""]))


def _next_in_line(opened: Opened, place: AttributeReference) -> Callable[..., Any]:
    """What comes after a class that only inherits: for a subclass with several bases, not always the same.

    With `class D(Sub, Other)`, a hook on ``Sub.m`` stands before ``Other.m``, as ``Sub`` does.
    """
    owner, name, inherited = place.owner, place.name, opened.called
    if name != "__new__" and issubclass(type(place.raw), staticmethod):
        return inherited  # nobody knows for which class it is called

    def called(subject: Any, /, *args: Any, **kwargs: Any) -> Any:
        cls = subject if is_class(subject) else type(subject)
        if cls is owner or not derives(cls, owner):
            return inherited(subject, *args, **kwargs)
        found = found_after(cls, owner, name)
        if found is MISSING or found is place.raw:
            return inherited(subject, *args, **kwargs)
        if issubclass(type(found), property):
            return getattr(found, place.part or "fget")(subject, *args, **kwargs)
        return getattr(super(owner, subject), name)(
            *([subject] if name == "__new__" else []), *args, **kwargs
        )

    return functools.update_wrapper(called, opened.content) if callable(opened.content) else called


def _late(opened: Opened, place: AttributeReference) -> Opened:
    """What somebody's descriptor gives may be bound in a way of its own: then it is what binds."""
    if type(opened.content) is types.FunctionType:
        return opened
    return dataclasses.replace(opened, called=bound_late(opened.content, place.owner))


def _check_new(place: AttributeReference) -> None:
    if place.raw is object.__new__:
        # Once a class had a __new__ of its own, CPython no longer lets object.__new__ ignore arguments.
        raise HookError(
            f"{place} is object's own, and CPython cannot forget another one again; "
            f"hook '{str(place).removesuffix('__new__')}__init__'"
        )


def _open_for_owner(place: AttributeReference) -> Opened:
    """An instance is given a method of its class, or a class one of its metaclass: bound to it."""
    raw, owner = place.raw, place.owner
    if issubclass(type(raw), staticmethod):
        return _opened(place, raw.__func__, lambda woven: woven)
    if issubclass(type(raw), classmethod):
        return _opened(place, raw.__func__, lambda woven: types.MethodType(woven, type(owner)))
    if not callable(raw) or hasattr(type(raw), "__set__"):
        raise HookError(
            f"{place} is a {type(raw).__name__} of {type(owner).__qualname__}, which rules over whatever the "
            f"instance has; hook '{type(owner).__module__}:{type(owner).__qualname__}.{place.name}'"
        )
    if is_class(owner):
        return _opened(place, raw, classmethod)
    return _opened(place, raw, lambda woven: types.MethodType(woven, owner))


def _only_binds(raw: Any) -> bool:
    """A descriptor that gives what is called, and lets instances have an attribute of the same name."""
    return hasattr(type(raw), "__get__") and not hasattr(type(raw), "__set__")


def _open_property(place: AttributeReference) -> Opened:
    raw, part = place.raw, place.part or "fget"
    function = getattr(raw, part)
    if function is None:
        have = ", ".join(name for name in ("fget", "fset", "fdel") if getattr(raw, name) is not None)
        raise HookError(f"{place}: the property has no {part}; it has {have}")

    def rebuild(woven: Mapping[str, Any]) -> Any:
        functions = {name: getattr(raw, name) for name in ("fget", "fset", "fdel")}
        functions.update({key or "fget": value for key, value in woven.items()})
        return rebuilt(raw, property, *functions.values())

    return Opened(function, function, rebuild)


# -- the attribute that join points stand in -----------------------------------------------------------------

logger = logging.getLogger("sgl_aspects")


class Slot:
    """One attribute: its original, and what stands there as far as we know.

    :param rebuild: makes the attribute anew around woven callables; parts as in :class:`AttributeReference`.
    """

    def __init__(self, place: AttributeReference, rebuild: Rebuild) -> None:
        self.original = place.raw
        self.standing = place.raw
        self._place = place
        self._rebuild = rebuild
        self._occupants: dict[str, Any] = {}
        self._made: dict[frozenset[tuple[str, int]], Any] = {}

    @property
    def is_ours(self) -> bool:
        """Nobody else has written there."""
        vacant = self._place.inherited and not self._occupants
        return current(self._place.owner, self._place.name) is (MISSING if vacant else self.standing)

    def with_occupant(self, part: str, woven: Any) -> Any:
        """What stands there when ``woven`` is in."""
        return self._with({**self._occupants, part: woven})

    def put(self, part: str, woven: Any) -> None:
        """Put ``woven`` there.

        :raises Exception: the attribute cannot be written; nothing has changed then.
        """
        self._stand({**self._occupants, part: woven})

    def take_out(self, part: str) -> None:
        """Take away what was put there; the last one leaves the original behind."""
        self._stand({other: woven for other, woven in self._occupants.items() if other != part})

    def follow(self, below: Any, rebuild: Rebuild) -> None:
        """Another original: what an inherited attribute comes from has changed."""
        self.original = below
        self._rebuild = rebuild
        self._made = {_key(self._occupants): self.standing} if self._occupants else {}
        if not self._occupants:
            self.standing = below

    def own_containers(self) -> list[Any]:
        """Everything of ours that holds the original on purpose."""
        cells = _cells(self._rebuild)
        nested = [cell for outer in cells for cell in _cells(outer.cell_contents)]
        ours = [self, self.__dict__, self._occupants, self._made, *self._made.values()]
        return [*ours, self.original, *cells, *nested]

    def _stand(self, occupants: dict[str, Any]) -> None:
        owner, name = self._place.owner, self._place.name
        wanted = self._with(occupants)
        if not self.is_ours:
            logger.info("%s: somebody else's patch stands there; it is left in place", self._place)
        elif self._place.inherited and not occupants:
            delattr(owner, name)
        else:
            before = current(owner, name)
            setattr(owner, name, wanted)
            if is_class(owner) and current(owner, name) is before:
                raise AttributeError(f"its metaclass {type(owner).__qualname__} ignores assignments")
        self._occupants = occupants
        self.standing = wanted

    def _with(self, occupants: Mapping[str, Any]) -> Any:
        if not occupants:
            return self.original
        key = _key(occupants)
        if key not in self._made:
            self._made[key] = self._rebuild(occupants)
        return self._made[key]


def _key(occupants: Mapping[str, Any]) -> frozenset[tuple[str, int]]:
    return frozenset((part, id(woven)) for part, woven in occupants.items())


def _cells(function: Any) -> tuple[Any, ...]:
    return getattr(function, "__closure__", None) or ()
