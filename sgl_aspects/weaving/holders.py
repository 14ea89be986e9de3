"""Kinds of holders, and how each gets a new object in the place of an old one.

``new(value)`` says what shall stand where ``value`` stands: the same where it is none of the old ones.

Methods of holders that users may have overridden are not called: a dictionary that loads on `items()` stays
unloaded, an instance whose `__setattr__` refuses does not refuse.
"""

from __future__ import annotations

import collections
import functools
import gc
import sys
import types
from collections.abc import Callable
from typing import Any

from sgl_aspects.weaving.places import is_a, is_class, is_filled, namespace, slots_of

New = Callable[..., Any]

DESCRIPTORS = (staticmethod, classmethod, property)
"""Immutable descriptors that hold functions: those that hold an old one are made anew."""

SILENT = (types.GetSetDescriptorType, types.MemberDescriptorType)
"""The descriptors of a class belong to it."""

_FACTORY: Any = vars(collections.defaultdict)["default_factory"]

_REMADE_FROM = "_sgl_aspects_remade_from"


def replace_in(holder: Any, new: New) -> bool:
    """Change ``holder`` where it is; False where some of what it holds has to stay."""
    if is_a(holder, (list, collections.deque)):
        _replace_in_sequence(holder, new)
    elif is_a(holder, set):
        _replace_in_set(holder, new)
    elif is_a(holder, dict):
        for key, value in list(dict.items(holder)):
            if new(value) is not value:
                dict.__setitem__(holder, key, new(value))
        if is_a(holder, collections.defaultdict):
            _FACTORY.__set__(holder, new(_FACTORY.__get__(holder)))
    elif is_a(holder, types.CellType):
        if not _is_class_cell(holder):
            holder.cell_contents = new(holder.cell_contents)
    elif is_a(holder, functools.partial):
        _replace_in_partial(holder, new)
    elif is_a(holder, types.FunctionType):
        return True  # its defaults, dictionary and closure are holders of their own
    elif is_a(holder, functools.cached_property):
        holder.func = new(holder.func)
    else:
        replace_attributes(holder, new)
        return all(new(value) is value for value in gc.get_referents(holder))
    # A subclass of a container may have attributes of its own.
    replace_attributes(holder, new)
    return True


def replace_in_class(cls: type, new: New) -> None:
    """Change the attributes of a class."""
    # Through setattr: a write into the raw dictionary would leave CPython's method cache as it was.
    for name, value in list(type.__dict__["__dict__"].__get__(cls).items()):
        if new(value) is not value:
            type.__setattr__(cls, name, new(value))


def replace_tuple(holder: tuple[Any, ...], owners: list[Any], new: New) -> int:
    """Change the functions whose defaults ``holder`` is; returns how many of ``owners`` are in order."""
    functions = [f for f in owners if is_a(f, types.FunctionType) and f.__defaults__ is holder]
    for function in functions:
        function.__defaults__ = tuple(new(value) for value in holder)
    partials = [p for p in owners if is_a(p, functools.partial) and p.args is holder]
    for partial in partials:
        _replace_in_partial(partial, new)
    linearised = [cls for cls in owners if is_class(cls) and _is_of_class(holder, cls)]
    return len(functions) + len(partials) + len(linearised)


def bound_anew(method: types.MethodType, new: New) -> types.MethodType:
    """A method bound to the same object, of the new function."""
    function = new(method.__func__, method.__self__)
    return method if function is method.__func__ else types.MethodType(function, method.__self__)


def descriptor_anew(descriptor: Any, new: New) -> Any:
    """A descriptor of the same type around new functions; the earlier one, where it was made from that."""
    parts = ("fget", "fset", "fdel") if is_a(descriptor, property) else ("__func__",)
    held = [getattr(descriptor, part) for part in parts]
    wanted = [new(value) for value in held]
    if all(now is then for now, then in zip(wanted, held)):
        return descriptor
    earlier = getattr(descriptor, "__dict__", {}).get(_REMADE_FROM)
    if earlier is not None and all(getattr(earlier, part) is value for part, value in zip(parts, wanted)):
        return earlier
    if is_a(descriptor, property):
        return rebuilt(descriptor, property, *wanted)
    anew = rebuilt(descriptor, staticmethod if is_a(descriptor, staticmethod) else classmethod, *wanted)
    anew.__dict__[_REMADE_FROM] = descriptor
    return anew


def rebuilt(descriptor: Any, kind: type, *functions: Any) -> Any:
    """A descriptor of the type of ``descriptor`` around other functions, with its attributes.

    Made by the constructor of ``kind``, its built-in base: that of a subclass may take other arguments.
    """
    make: Any = kind
    anew = make.__new__(type(descriptor))
    make.__init__(anew, *functions, *([descriptor.__doc__] if kind is property else ()))
    for slot in slots_of(type(descriptor)):
        if is_filled(slot, descriptor):
            slot.__set__(anew, slot.__get__(descriptor))
    for name, value in namespace(descriptor).items():
        if name not in anew.__dict__ or (kind is functools.cached_property and name != "func"):
            anew.__dict__[name] = value
    if kind is property and sys.version_info >= (3, 13) and anew.__name__ != descriptor.__name__:
        anew.__name__ = descriptor.__name__
    return anew


def _replace_in_sequence(holder: Any, new: New) -> None:
    setitem = (list if is_a(holder, list) else collections.deque).__setitem__
    values = list.__iter__(holder) if is_a(holder, list) else collections.deque.__iter__(holder)
    for index, value in enumerate(list(values)):
        if new(value) is not value:
            setitem(holder, index, new(value))


def _replace_in_set(holder: set[Any], new: New) -> None:
    for value in [value for value in set.__iter__(holder) if new(value) is not value]:
        # In one step: another thread may be walking through the set, and its size must not change.
        set.symmetric_difference_update(holder, {value, new(value)})


def _replace_in_partial(holder: functools.partial[Any], new: New) -> None:
    state: list[Any] = list(functools.partial.__reduce__(holder)[2])
    state[0] = new(state[0])
    state[1] = tuple(new(value) for value in state[1])
    functools.partial.__setstate__(holder, tuple(state))  # type: ignore[attr-defined]


def replace_attributes(holder: Any, new: New) -> None:
    """Change the attributes and slots of an instance."""
    attributes = namespace(holder)
    for name, value in list(dict.items(attributes)):
        if new(value) is not value:
            dict.__setitem__(attributes, name, new(value))
    for slot in slots_of(type(holder)):
        value = slot.__get__(holder, type(holder)) if is_filled(slot, holder) else None
        if new(value) is not value:
            slot.__set__(holder, new(value))


def _is_class_cell(cell: types.CellType) -> bool:
    """Whether ``cell`` is what `super()` looks into: it belongs to the class, whatever stands for that."""
    if not is_class(cell.cell_contents):
        return False
    closures = tuple(holder for holder in gc.get_referrers(cell) if is_a(holder, tuple))
    for function in gc.get_referrers(*closures):
        if isinstance(function, types.FunctionType):
            for name, held in zip(function.__code__.co_freevars, function.__closure__ or ()):
                if held is cell:
                    return name == "__class__"
    return False


def _is_of_class(holder: tuple[Any, ...], cls: type) -> bool:
    return holder is cls.__mro__ or holder is type.__dict__["__bases__"].__get__(cls)
