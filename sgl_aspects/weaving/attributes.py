"""Attribute references: lookup of a target in a loaded module.

Lookup reads dictionaries only: it never loads a lazy module, runs a property or calls `__getattr__`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

from sgl_aspects.weaving.targets import Alternate, segment_regex

MISSING: Any = object()
PROPERTY_PARTS = ("fget", "fset", "fdel")

# Shared, never written to: rebinding knows containers by id, and a new one might get the id of a freed one.
_EMPTY: dict[str, Any] = {}

# Reads the namespace of every module, even if its class overrides `__dict__`.
_MODULE_NAMESPACE: Any = vars(types.ModuleType)["__dict__"]  # a member descriptor
_CLASS_NAMESPACE: Any = vars(type)["__dict__"]
_C_ATTRIBUTES = (types.GetSetDescriptorType, types.MemberDescriptorType)


class OwnDict(dict[Any, Any]):
    """A dictionary of the weaver's own that holds originals: rebinding skips it."""

    __slots__ = ()


class Attributes(OwnDict):
    """The attributes of a woven function: an original as ``__wrapped__``, and what rebinding changes."""

    __slots__ = ()


class OfMetaclass(classmethod):  # type: ignore[type-arg]
    """A metaclass's method in the namespace of a class, whose instances do not have it."""

    def __get__(self, instance: Any, owner: Any = None, /) -> Any:
        if instance is not None:
            name = self.__func__.__name__
            raise AttributeError(f"{type(instance).__name__!r} object has no attribute {name!r}")
        return super().__get__(instance, owner)


class AttributeReference(NamedTuple):
    """An attribute of a module, class or instance.

    :param raw: its value, without descriptor access.
    :param inherited: ``raw`` comes from a base class (or, for an instance, from its class).
    :param part: for a property, one of its functions: ``fset``, ``fdel``, or "" for ``fget``.
    """

    owner: Any
    name: str
    raw: Any
    inherited: bool = False
    part: str = ""

    @property
    def key(self) -> tuple[int, str, str]:
        return (id(self.owner), self.name, self.part)

    def __str__(self) -> str:
        if is_class(self.owner):
            prefix = f"{class_name(self.owner)}."
        elif is_module(self.owner):
            prefix = f"{namespace(self.owner).get('__name__', '?')}:"
        else:
            prefix = f"{class_name(type(self.owner))} instance."
        return prefix + self.name + (f".{self.part}" if self.part else "")

    @property
    def binds_to_owner(self) -> bool:
        """Return whether ``raw`` comes from the class of an instance, or from the metaclass of a class."""
        if not self.inherited:
            return False
        return not is_class(self.owner) or among(bases(self.owner)[1:], self.name) is MISSING


def is_a(obj: Any, kinds: type | tuple[type, ...]) -> bool:
    """Like isinstance(), without reading `__class__`, which a lazy module or a foreign proxy defines."""
    return issubclass(type(obj), kinds)


def claims_to_be(obj: Any, kinds: type | tuple[type, ...]) -> bool:
    """Like isinstance(), where a proxy counts as the object that it wraps; False if it raises."""
    try:
        return isinstance(obj, kinds)
    except Exception:  # noqa: BLE001  an object's __getattribute__ may raise anything
        return False


def is_class(obj: Any) -> bool:
    """Return whether ``obj`` is a class, by its type only."""
    return issubclass(type(obj), type)


def bases(cls: type) -> tuple[type, ...]:
    """Return the method resolution order; attributes of that name on a metaclass are not read."""
    found: tuple[type, ...] = type.__dict__["__mro__"].__get__(cls)
    return found


def class_name(cls: type) -> str:
    """Return ``module:Qualified.name`` of a class."""
    return f"{class_module(cls)}:{type.__dict__['__qualname__'].__get__(cls)}"


def class_module(cls: type) -> str:
    """Return the ``__module__`` of ``cls``; "?" if it has none."""
    name = type.__dict__["__module__"].__get__(cls)
    return name if is_a(name, str) else "?"


def derives(cls: type, base: type) -> bool:
    """Like issubclass(), by identity: a metaclass may override comparison, hash and subclass checks."""
    return holds(bases(cls), base)


def holds(items: Iterable[Any], wanted: Any) -> bool:
    """Like ``in``, by identity."""
    return any(item is wanted for item in items)


def is_module(obj: Any) -> bool:
    """Return whether ``obj`` is a module, by its type only."""
    return issubclass(type(obj), types.ModuleType)


def namespace(owner: Any) -> dict[str, Any]:
    """Return the dictionary of ``owner`` without loading a lazy module; empty if it has none."""
    kind = type(owner)
    if issubclass(kind, types.ModuleType):
        return _MODULE_NAMESPACE.__get__(owner)  # type: ignore[no-any-return]
    if issubclass(kind, type):
        return dict(_CLASS_NAMESPACE.__get__(owner))
    # C descriptors only: a property named `__dict__` would run foreign code.
    found: Any = among(bases(kind), "__dict__")
    try:
        found = found.__get__(owner) if is_a(found, _C_ATTRIBUTES) else None
    except AttributeError:  # a proxy in C around an object without a dictionary
        return _EMPTY
    names: dict[str, Any] = found if is_a(found, dict) else _EMPTY
    return names


def current(owner: Any, name: str) -> Any:
    """Return the value of ``name`` in the dictionary of ``owner`` itself, or MISSING."""
    names = _CLASS_NAMESPACE.__get__(owner) if is_class(owner) else namespace(owner)
    return names.get(name, MISSING)


class Presence(enum.Enum):
    """The result of looking a target up in a module."""

    FOUND = "found"
    LAZY = "lazy"
    """The module creates it on first access."""
    ABSENT = "absent"
    """It is missing, and no later import can define it."""
    PENDING = "pending"
    """It is missing, but a later import may define it."""


class Resolution(NamedTuple):
    """The result of resolving an alternate of a target in one module.

    :param places: the attributes; for a lazy one, the ``__getattr__`` that creates it.
    :param detail: the reason why it is not woven, for reports.
    """

    presence: Presence
    places: tuple[AttributeReference, ...] = ()
    detail: str = ""


def resolve(
    alternate: Alternate, name: str, module: Any, subclasses: Sequence[type] | None = None
) -> Resolution | None:
    """Resolve ``alternate`` in ``module``, loaded as ``name``; None if it names another module.

    Changes nothing, imports nothing, and runs none of the module's code.

    :param subclasses: for ``Class+``: the subclasses to look at; without it, all.
    """
    path = alternate.attribute_path(name)
    if path is None:
        return None
    places = tuple(
        place
        for place in find(module, path, subclasses)
        if not is_module(place.raw) and not ("*" in alternate.text and _is_covered(place, alternate))
    )
    if places:
        return Resolution(Presence.FOUND, places)
    path = tuple(segment.removesuffix("+") for segment in path)
    maker = _attribute_maker(module)
    # A wildcard covers what the module defines, not what it makes.
    if current(module, path[0]) is MISSING and maker is not None and "*" not in path[0]:
        detail = f"module {name} creates {path[0]} on first access, which has not happened"
        return Resolution(Presence.LAZY, (maker,), detail)
    if _is_absent_for_good(alternate, name, module):
        return Resolution(Presence.ABSENT, detail=_absence(path, name, module))
    return Resolution(Presence.PENDING)


def _attribute_maker(module: Any) -> AttributeReference | None:
    """Return the ``__getattr__`` of ``module``, of its own or of its class; None if it cannot keep any."""
    for owner in () if namespace(module) is _EMPTY else (module, *bases(type(module))):
        raw = current(owner, "__getattr__")
        if is_a(raw, types.FunctionType):
            return AttributeReference(owner, "__getattr__", raw)
    return None


def _is_absent_for_good(alternate: Alternate, name: str, module: Any) -> bool:
    """Return whether no later import can define the attribute of ``alternate`` in ``module``."""
    if alternate.has_module_pattern:
        return False
    if alternate.module is not None:
        return True
    following = f"{name}.{alternate.path[name.count('.') + 1]}"
    # Another module that the target goes on in is looked into on its own.
    return following == alternate.text or not _is_submodule(following, module)


def _is_submodule(name: str, package: Any) -> bool:
    """Return whether ``package`` has a module of this name, loaded or not."""
    search_path = namespace(package).get("__path__")
    # importlib.util.find_spec() might import parent packages.
    return search_path is not None and (
        name in sys.modules or PathFinder.find_spec(name, search_path) is not None
    )


def _absence(path: tuple[str, ...], name: str, module: Any) -> str:
    """Describe the missing attribute, with similar names in ``module``."""
    names = [key for key in namespace(module) if not key.startswith("__")]
    owner = current(module, path[0])
    within = namespace(owner).get("__name__") if is_module(owner) else f"{name}.{path[0]}"
    if is_module(owner) or _is_submodule(f"{name}.{path[0]}", module):
        return f"{within} is a module: write '{within}:{'.'.join(path[1:]) or 'name'}'"
    close = similar(path[0], names)
    if path[0] in names:
        every = {key for cls in bases(owner) for key in namespace(cls)} if is_class(owner) else ()
        names = sorted(key for key in every if not key.startswith("__"))
        close = [f"{path[0]}.{key}" for key in similar(path[-1], names)]
    hint = f"; close names: {', '.join(close)}" if close else ""
    if name == "__main__":
        hint += (
            "; it is the program's own file, whose functions exist once it runs: move the function to a "
            "module that it imports, or call sgl_aspects.weave() below its definition"
        )
    return f"module {name} is loaded and has no {'.'.join(path)}{hint}"


def similar(name: str, names: list[str]) -> list[str]:
    """Return up to three of ``names`` that share many pairs of letters with ``name``; needs no import."""
    pairs = {one: {f" {one} "[i : i + 2].casefold() for i in range(len(one) + 1)} for one in (name, *names)}
    wanted = pairs[name]
    shared = {one: len(wanted & pairs[one]) / (len(wanted) + len(pairs[one])) for one in names}
    return [one for one in sorted(names, key=lambda one: -shared[one]) if shared[one] > 0.25][:3]


def find(
    module: Any, path: tuple[str, ...], subclasses: Sequence[type] | None = None
) -> Iterator[AttributeReference]:
    """Yield the attributes that ``path`` names in ``module``: several for wildcards, none if missing.

    :param subclasses: for ``Class+``: the subclasses to look at; without it, all.
    """
    if len(path) > 1 and path[-1] in PROPERTY_PARTS:
        for place in _walk(module, path[:-1], subclasses):
            if is_a(place.raw, property):
                yield place._replace(part="" if path[-1] == "fget" else path[-1])
                return
    yield from _walk(module, path, subclasses)


def _is_covered(place: AttributeReference, alternate: Alternate) -> bool:
    """Return whether the pattern also covers a base class from which the method is inherited."""
    if not place.inherited or not is_class(place.owner):
        return False
    for base in bases(place.owner)[1:]:
        module, _, name = class_name(base).partition(":")
        defines = current(base, place.name) is not MISSING
        if defines or inherited(base, place.name) is not MISSING:
            standing = find(sys.modules.get(module), tuple(name.split(".")))
            if any(one.raw is base for one in standing) and alternate.names_class(module, name):
                return True
        if defines:
            return False
    return False


def _walk(
    owner: Any, path: tuple[str, ...], subclasses: Sequence[type] | None
) -> Iterator[AttributeReference]:
    segment, rest = path[0], path[1:]
    for place in _attributes(owner, segment):
        if not rest:
            yield place
        elif is_class(place.raw) and segment.endswith("+"):
            family = [one for one in subclasses or () if derives(one, place.raw)]
            for subclass in with_subclasses(place.raw) if subclasses is None else family:
                # Inherited methods are woven once, on the class that defines them.
                for found in _walk(subclass, rest, subclasses):
                    if subclass is place.raw or not found.inherited:
                        yield found
        # A wildcard for an owner covers classes, not what functions and instances carry.
        elif not is_module(place.raw) and ("*" not in segment or is_class(place.raw)):
            yield from _walk(place.raw, rest, subclasses)


_DESCRIPTORS = (
    *(classmethod, staticmethod, property, types.DynamicClassAttribute),
    *(functools.cached_property, functools.partialmethod, functools.singledispatchmethod),
)


def _attributes(owner: Any, segment: str) -> Iterator[AttributeReference]:
    if "*" in segment:
        regex = segment_regex(segment)
        module_name = namespace(owner).get("__name__") if is_module(owner) else None
        for name, raw in list(namespace(owner).items()):
            if not regex.fullmatch(name) or name.startswith("__"):
                continue
            # A wildcard covers what the module defines, not what it imports.
            defined = module_name is None or _module_of(raw) == module_name
            if defined and (is_a(raw, _DESCRIPTORS) or callable(raw)):
                yield AttributeReference(owner, name, raw)
        return
    name = segment.removesuffix("+")
    raw = current(owner, name)
    if raw is not MISSING:
        yield AttributeReference(owner, name, raw)
        return
    raw = inherited(owner, name)
    if raw is not MISSING:
        yield AttributeReference(owner, name, raw, inherited=True)


def inherited(owner: Any, name: str) -> Any:
    """Return the value of ``name`` from the bases of ``owner`` (for an instance, its class), or MISSING."""
    if is_module(owner):
        return among([cls for cls in bases(type(owner)) if not derives(types.ModuleType, cls)], name)
    if not is_class(owner):
        return among(bases(type(owner)), name)
    raw = among(bases(owner)[1:], name)
    if raw is MISSING and not (name.startswith("__") and name.endswith("__")):
        # Special methods of a metaclass apply to the class itself, not to its instances.
        raw = among([meta for meta in bases(type(owner)) if not derives(type, meta)], name)
    return raw


def among(classes: Iterable[type], name: str) -> Any:
    """Return the value of ``name`` in the first of ``classes`` that has it of its own; or MISSING."""
    found = (current(cls, name) for cls in classes)
    return next((raw for raw in found if raw is not MISSING and type(raw) is not OfMetaclass), MISSING)


def _module_of(obj: Any) -> Any:
    """Return the name of the module that defines a function or class; None for anything else."""
    if is_a(obj, (types.FunctionType, types.BuiltinFunctionType)):
        return obj.__module__
    # What `functools` makes of a function has the function's own names, and so have static methods.
    return class_module(obj) if is_class(obj) else namespace(obj).get("__module__")


def with_subclasses(cls: type) -> list[type]:
    found = {id(cls): cls}  # by id: a metaclass may leave its classes without a hash
    waiting = [cls]
    while waiting:
        subclasses: list[type] = type.__subclasses__(waiting.pop())
        waiting += [one for one in subclasses if id(one) not in found]
        found |= {id(one): one for one in subclasses}
    return list(found.values())


def with_nested(classes: Iterable[type]) -> list[type]:
    """Return ``classes`` and those defined within them or their bases."""
    found = list(classes)
    for cls in found:  # grows during the iteration
        for base in bases(cls):
            within = [one for one in _CLASS_NAMESPACE.__get__(base).values() if is_class(one)]
            nested = [one for one in within if class_name(one).startswith(f"{class_name(base)}.")]
            found += [one for one in nested if not holds(found, one)]
    return found


def filled_slots(instance: Any) -> list[tuple[types.MemberDescriptorType, Any]]:
    """Return the members from `__slots__` that are set in ``instance``: those of C types may be read-only."""
    found = []
    for base in bases(type(instance)):
        if current(base, "__slots__") is not MISSING:
            for slot in _CLASS_NAMESPACE.__get__(base).values():
                if is_a(slot, types.MemberDescriptorType):
                    with contextlib.suppress(AttributeError):
                        found.append((slot, slot.__get__(instance, type(instance))))
    return found
