"""Descriptors: unwrapping the callable of an attribute, and rebuilding the descriptor around a woven one.

A plain Python function, bare or inside a classmethod, staticmethod, property or cached_property, becomes a
woven function inside a new descriptor of the same type. Other callables get a proxy.

Types are tested by `type()`, never by `isinstance`: a foreign proxy claims the class of what it wraps.
"""

from __future__ import annotations

import functools
import reprlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from sgl_aspects import compat
from sgl_aspects.errors import HookError
from sgl_aspects.weaving.attributes import (
    MISSING,
    PROPERTIES,
    PROPERTY_PARTS,
    AttributeReference,
    OwnDict,
    filled_slots,
    found_after,
    inherited,
    is_a,
    is_class,
    namespace,
)
from sgl_aspects.weaving.chain import calls_original
from sgl_aspects.weaving.proxies import bound_late

# -- unwrapping ----------------------------------------------------------------------------------------------


Opened = tuple[Any, Callable[..., Any]]
"""The callable in an attribute, and the function to call for it: itself, or one that binds it first."""


def open_attribute(place: AttributeReference) -> Opened:
    """Unwrap the attribute at ``place``.

    :raises HookError: it contains no callable, or cannot be replaced.
    """
    content, called = _open(place)
    if place.binds_to_owner:
        return content, _of_class(content, place)
    is_shadow = place.inherited and is_class(place.owner)
    return content, _next_in_line(content, called, place) if is_shadow else called


def _open(place: AttributeReference) -> Opened:
    raw, owner = place.raw, place.owner
    if is_class(raw):
        raise HookError(
            f"{place} is a class, and a class takes only REPLACE with a class; "
            f"to hook its calls use '{place}.__init__' or another of its methods"
        )
    if place.binds_to_owner:
        return _open_for_owner(place)
    if raw is object.__new__:
        # After a class had its own __new__, CPython no longer lets object.__new__ ignore arguments.
        raise HookError(
            f"{place} is object's own, and CPython cannot undo replacing it; "
            f"hook '{str(place).removesuffix('__new__')}__init__'"
        )
    if is_a(raw, PROPERTIES):
        function = getattr(raw, place.part or "fget")
        if function is None:
            have = ", ".join(name for name in PROPERTY_PARTS if getattr(raw, name) is not None)
            raise HookError(f"{place}: the property has no {place.part}; it has {have}")
        return function, function
    inner = _bound_by_classmethod(raw)
    if inner is not None:
        return _open(place._replace(raw=inner))
    if is_a(raw, (classmethod, staticmethod)):
        content = raw.__func__
        binds = is_a(raw, classmethod) and sys.version_info < (3, 13)
    elif is_a(raw, functools.cached_property):
        content, binds = raw.func, False
    else:
        content, binds = raw, is_class(owner)
        if (
            binds
            and not callable(raw)
            and hasattr(type(raw), "__get__")
            and not hasattr(type(raw), "__set__")
        ):
            return raw, bound_late(raw, owner)
    opened = _itself(place, content)
    return (content, bound_late(content, owner)) if binds else opened


def _bound_by_classmethod(raw: Any) -> Any:
    """Return the descriptor in a classmethod, which binds it before Python 3.13; None if there is none."""
    inner = raw.__func__ if is_a(raw, classmethod) and sys.version_info < (3, 13) else None
    return inner if is_a(inner, (classmethod, staticmethod, *PROPERTIES)) else None


def _itself(place: AttributeReference, content: Any) -> Opened:
    if compat.is_pytest_fixture(content):
        raise HookError(
            f"{place} is a pytest fixture, which pytest finds by its type; hook a function that it calls"
        )
    if not callable(content):
        raise HookError(
            f"{place} is {type(content).__name__} {reprlib.repr(content)}, "
            "which cannot be called, so not hooked"
        )
    return content, content


def _next_in_line(
    content: Any, fallback: Callable[..., Any], place: AttributeReference
) -> Callable[..., Any]:
    """Return a function that calls the next implementation in the subject's method resolution order.

    With `class D(Sub, Other)`, a hook on an inherited ``Sub.m`` comes before ``Other.m``, as ``Sub`` does.
    """
    owner, name, raw = place.owner, place.name, place.raw
    while _bound_by_classmethod(raw) is not None:
        raw = _bound_by_classmethod(raw)
    if name != "__new__" and is_a(raw, staticmethod):  # it does not get its class as an argument
        return calls_original(lambda *args, **kwargs: getattr(super(owner, owner), name)(*args, **kwargs))
    is_method = is_a(raw, (types.FunctionType, classmethod))
    is_getter = is_a(raw, PROPERTIES) and not place.part

    def called(subject: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            following = super(owner, subject)
        except TypeError:  # it is not an instance of the class
            return fallback(subject, *args, **kwargs)
        if is_method:
            return getattr(following, name)(*args, **kwargs)
        if is_getter:
            return getattr(following, name)
        found = found_after(subject if is_class(subject) else type(subject), owner, name)
        if found is MISSING or found is raw:
            return fallback(subject, *args, **kwargs)
        if place.part:
            return getattr(found, place.part)(subject, *args)
        if is_a(found, functools.cached_property):
            return found.func(subject)
        value = getattr(following, name)
        if is_a(raw, functools.cached_property):
            return value
        return value(*([subject] if name == "__new__" else []), *args, **kwargs)

    return calls_original(functools.update_wrapper(called, content))


def _open_for_owner(place: AttributeReference) -> Opened:
    """Unwrap a method that an instance inherits from its class, or a class from its metaclass."""
    raw, owner = place.raw, place.owner
    if not is_class(owner) and place.name == "__call__":
        raise HookError(
            f"{place}: a call of an instance uses its class alone; hook the instance itself, or all of them "
            f"with '{type(owner).__module__}:{type(owner).__qualname__}.__call__'"
        )
    if is_a(raw, (staticmethod, classmethod)):
        return _itself(place, raw.__func__)
    if not callable(raw) or hasattr(type(raw), "__set__"):
        raise HookError(
            f"{place} is a {type(raw).__name__} of {type(owner).__qualname__}, which precedes the "
            f"instance's attributes; hook '{type(owner).__module__}:{type(owner).__qualname__}.{place.name}'"
        )
    return _itself(place, raw)


def _of_class(content: Any, place: AttributeReference) -> Callable[..., Any]:
    """Return a function that calls ``content``, or what has replaced it in the class of the owner since."""
    owner, name, raw, cls = place.owner, place.name, place.raw, type(place.owner)
    lookup: Any = type(cls).__getattribute__
    if lookup is not type.__getattribute__:  # it may answer anything
        return content  # type: ignore[no-any-return]

    def called(*args: Any, **kwargs: Any) -> Any:
        found = getattr(cls, name, content)
        if found is content or getattr(found, "__func__", MISSING) is content:
            return content(*args, **kwargs)
        found = inherited(owner, name)
        bind = getattr(type(found), "__get__", None)
        bound = found if bind is None else bind(found, owner, cls)
        return bound(*(args if is_a(raw, staticmethod) else args[1:]), **kwargs)

    return calls_original(called)


# -- rebuilding --------------------------------------------------------------------------------------------


class _OfMetaclass(classmethod):  # type: ignore[type-arg]
    """A metaclass's method in the namespace of a class, whose instances do not have it."""

    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        if instance is not None:
            name = self.__func__.__name__
            raise AttributeError(f"{type(instance).__name__!r} object has no attribute {name!r}")
        return super().__get__(instance, owner)


def rebuild(place: AttributeReference, woven: Mapping[str, Any]) -> Any:
    """Return the attribute at ``place`` around the callables ``woven``, by part: "" but for properties."""
    raw, owner = place.raw, place.owner
    if is_a(raw, PROPERTIES):
        functions = {name: getattr(raw, name) for name in PROPERTY_PARTS}
        functions.update({part or "fget": function for part, function in woven.items()})
        return rebuilt(raw, _kind_of_property(raw), *functions.values())
    if not place.binds_to_owner:
        for kind in (classmethod, staticmethod, functools.cached_property):
            if is_a(raw, kind):
                inner = _bound_by_classmethod(raw)
                content = woven[""] if inner is None else rebuild(place._replace(raw=inner), woven)
                return rebuilt(raw, kind, content)
    elif is_a(raw, classmethod):
        return types.MethodType(woven[""], type(owner))
    elif not (is_a(raw, staticmethod) or is_class(raw)):
        return _OfMetaclass(woven[""]) if is_class(owner) else types.MethodType(woven[""], owner)
    return woven[""]


_REMADE_FROM = "_sgl_aspects_remade_from"


def descriptor_anew(descriptor: Any, new: Callable[..., Any]) -> Any:
    """Return a descriptor of the same type around new functions; the earlier one if it had the same."""
    parts = PROPERTY_PARTS if is_a(descriptor, PROPERTIES) else ("__func__",)
    held = [getattr(descriptor, part) for part in parts]
    wanted = [new(value) for value in held]
    if all(now is then for now, then in zip(wanted, held)):
        return descriptor
    earlier = getattr(descriptor, "__dict__", {}).get(_REMADE_FROM, {}).get("origin")
    if earlier is not None and all(getattr(earlier, part) is value for part, value in zip(parts, wanted)):
        return earlier
    if is_a(descriptor, PROPERTIES):
        return rebuilt(descriptor, _kind_of_property(descriptor), *wanted)
    anew = rebuilt(descriptor, staticmethod if is_a(descriptor, staticmethod) else classmethod, *wanted)
    anew.__dict__[_REMADE_FROM] = OwnDict(origin=descriptor)
    return anew


def _kind_of_property(raw: Any) -> type:
    return next(kind for kind in PROPERTIES if is_a(raw, kind))


def rebuilt(descriptor: Any, kind: type, *functions: Any) -> Any:
    """Return a descriptor of the type of ``descriptor`` around other functions, with its attributes.

    Uses the constructor of ``kind``, its built-in base: that of a subclass may take other arguments.
    """
    make: Any = kind
    anew = make.__new__(type(descriptor))
    make.__init__(anew, *functions, *([descriptor.__doc__] if kind in PROPERTIES else ()))
    for slot, value in filled_slots(descriptor):
        slot.__set__(anew, value)
    for name, value in namespace(descriptor).items():
        if name not in anew.__dict__ or (kind is functools.cached_property and name != "func"):
            anew.__dict__[name] = value
    title = getattr(descriptor, "__name__", None) if kind is property else None  # Python 3.13
    if title is not None and getattr(anew, "__name__", None) != title:
        anew.__name__ = title
    return anew
