"""The attribute of a join point: unwrapped, and rebuilt around a woven callable, as a descriptor, too.

A plain Python function, bare or inside a descriptor, becomes a woven function inside a new descriptor of the
same type: a classmethod, staticmethod, property or cached_property, or one of another package that decorates
it. Other callables (builtins, lru_cache objects, partials, instances, other people's proxies), and
descriptors that give callables, get a proxy, which keeps their type, attributes and equality.

Types are tested by `type()`, never by `isinstance`: a foreign proxy claims the class of what it wraps.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import reprlib
import sys
import types
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import wrapt

from sgl_aspects import compat
from sgl_aspects.errors import HookError
from sgl_aspects.weaving.attributes import (
    MISSING,
    PROPERTY_PARTS,
    AttributeReference,
    OfMetaclass,
    OwnDict,
    among,
    bases,
    class_name,
    current,
    filled_slots,
    is_a,
    is_class,
    namespace,
)
from sgl_aspects.weaving.chain import calls_original
from sgl_aspects.weaving.functions import (
    CALLED_AS_BOUND,
    Binding,
    WovenFunction,
    WovenProxy,
    passing_on,
)

logger = logging.getLogger("sgl_aspects")

C_CALLABLES = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.ClassMethodDescriptorType),
    types.WrapperDescriptorType,
)
C_DESCRIPTORS = (*C_CALLABLES[1:], types.GetSetDescriptorType, types.MemberDescriptorType)

# -- the attribute ---------------------------------------------------------------------------------------


class Slot:
    """The attribute of a join point, or of several for a property: its original and the installed value.

    :ivar occupants: the woven callables that are installed, by part; a class as "".
    :ivar standing: what was last installed; at first the original.
    :ivar superseded: the class's module ran again, and another join point has the attribute now.
    """

    __slots__ = ("_origin", "_place", "occupants", "original", "standing", "superseded")

    def __init__(self, place: AttributeReference) -> None:
        self._place = place
        self.original = self.standing = place.raw
        self._origin = _origin_of(place.raw)
        self.superseded = False
        self.occupants: dict[str, Any] = OwnDict()

    @property
    def expected(self) -> Any:
        """The entry in the dictionary of the owner, unless other code has changed it."""
        return MISSING if self._place.inherited and not self.occupants else self.standing

    def weave(self, place: AttributeReference) -> tuple[Any, Callable[..., Any], WovenFunction]:
        """Return the callable in the attribute, the function to call for it, and its replacement.

        :raises HookError: it contains no callable, or cannot be replaced.
        """
        content, called = opened(place._replace(raw=self.original))
        rebuild(self._place, {place.part: content})  # may fail: now, before anything refers to it
        if type(content) is types.FunctionType:
            return content, called, WovenFunction(content)
        woven = WovenProxy(content, called, str(place), _binding_of(content))
        if isinstance(content, (wrapt.BaseObjectProxy, types.MethodType)):
            called = passing_on(woven.function, called)
        return content, called, woven

    def put(self, part: str, woven: Any) -> None:
        """Install ``woven``.

        :raises Exception: the attribute cannot be written; nothing has changed then.
        """
        self._install(OwnDict(self.occupants, **{part: woven}))

    def take_out(self, part: str) -> None:
        """Uninstall the callable of ``part``; the original is restored with the last one."""
        self._install(OwnDict(item for item in self.occupants.items() if item[0] != part))

    def _install(self, occupants: dict[str, Any]) -> None:
        owner, name = self._place.owner, self._place.name
        inherits = self._place.inherited
        place = self._place._replace(raw=self.original)
        parts = OwnDict({} if inherits else self._rebound_parts(), **occupants)
        wanted = rebuild(place, parts, self._origin) if parts else _noted(self.original, self._origin)
        present = current(owner, name)
        if self.superseded or present is not self.expected:
            logger.info("%s: another patch is there; it is left in place", self._place)
        elif inherits and not occupants:
            delattr(owner, name)
        else:
            setattr(owner, name, wanted)
            if current(owner, name) is present:
                raise AttributeError(f"its type {class_name(type(owner))} ignores assignments")
        if self.standing is not self.original:
            _remade.pop(id(self.standing), None)
        self.occupants = occupants
        self.standing = wanted

    def _rebound_parts(self) -> dict[str, Any]:
        """Return the functions in the installed property that are hooked by their own names, by part."""
        if not is_a(self.original, property):
            return {}
        ours = {part or "fget" for part in self.occupants}
        parts = {part: getattr(self.standing, part) for part in PROPERTY_PARTS if part not in ours}
        return {part: now for part, now in parts.items() if now is not getattr(self.original, part)}


# -- unwrapping ----------------------------------------------------------------------------------------------


Opened = tuple[Any, Callable[..., Any]]
"""The callable in an attribute, and the function to call for it: itself, or one that binds it first."""


def callable_in(place: AttributeReference) -> Any:
    """Return the callable in the attribute at ``place``; None if there is none."""
    with contextlib.suppress(HookError):
        return _open(place)[0]


def opened(place: AttributeReference) -> Opened:
    """Unwrap the attribute at ``place``.

    :raises HookError: it contains no callable, or cannot be replaced.
    """
    content, called = _open(place)
    if place.inherited and not place.binds_to_owner:
        called = _next_in_line(place, called)
    elif place.inherited and is_a(place.raw, types.FunctionType):
        cls, name = type(place.owner), place.name  # whose method has other hooks by then
        called = calls_original(lambda *args, **kwargs: getattr(cls, name)(*args, **kwargs))
    return content, called


def _open(place: AttributeReference) -> Opened:
    raw, owner = place.raw, place.owner
    if compat.is_pytest_fixture(raw):
        fix = "which pytest finds by its type; hook a function that it calls"
        raise HookError(f"{place} is a pytest fixture, {fix}")
    if is_class(raw):
        raise HookError(
            f"{place} is a class, and a class takes only REPLACE with a class; "
            f"to hook its calls use '{place}.__init__' or another of its methods"
        )
    if place.binds_to_owner:
        return _open_for_owner(place)
    is_constructor = is_a(raw, types.BuiltinFunctionType) and raw.__name__ == "__new__"
    if is_constructor and (raw is object.__new__ or not place.inherited):
        # After a class had its own __new__, CPython no longer lets object.__new__ ignore arguments; one of C
        # makes no more instances.
        fix = f"cannot undo replacing it; hook '{place._replace(name='__init__')}'"
        raise HookError(f"{place} is a class's own in C, and CPython {fix}")
    if is_a(raw, property):
        function = getattr(raw, place.part or "fget")
        if function is None:
            have = ", ".join(name for name in PROPERTY_PARTS if getattr(raw, name) is not None)
            raise HookError(f"{place}: the property has no {place.part}; it has {have}")
        return function, function
    decorated = _decorated(place)
    if decorated is not None:
        return _itself(place, decorated)
    binds = is_class(owner)
    if is_a(raw, (classmethod, staticmethod)):
        raw, binds = raw.__func__, is_a(raw, classmethod) and sys.version_info < (3, 13)
    if binds and not callable(raw) and _gives_callables(raw):
        return raw, _bound_late(raw)
    found = _itself(place, raw)
    return (raw, _bound_late(raw)) if binds else found


def _decorated(place: AttributeReference) -> Any:
    """Return the function of the attribute's name that a descriptor of a Python class holds, or None."""
    raw = place.raw
    if is_a(raw, functools.cached_property):
        return raw.func
    if callable(raw) or not hasattr(type(raw), "__get__"):
        return None
    if is_a(raw, (property, classmethod, *_METHOD_MAKERS)):
        return None
    held = [*namespace(raw).values(), *(value for _, value in filled_slots(raw))]
    functions = [one for one in held if type(one) is types.FunctionType and one.__name__ == place.name]
    return functions[0] if functions and all(one is functions[0] for one in functions) else None


def _gives_callables(raw: Any) -> bool:
    """Return whether ``raw`` may be a descriptor of methods: one that is also written to is not."""
    return hasattr(type(raw), "__get__") and not hasattr(type(raw), "__set__")


def _itself(place: AttributeReference, content: Any) -> Opened:
    is_read = is_class(place.owner) and hasattr(type(content), "__set__")
    if is_read or not callable(content):
        raise HookError(
            f"{place} is {type(content).__name__} {reprlib.repr(content)}, "
            f"which {'is read' if is_read else 'cannot be called'}, so not hooked"
        )
    return content, content


def _next_in_line(place: AttributeReference, captured: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the next implementation in the subject's method resolution order.

    With `class D(Sub, Other)`, a hook on an inherited ``Sub.m`` comes before ``Other.m``, as ``Sub`` does.
    """
    owner, name, raw = place.owner, place.name, place.raw
    if _decorated(place) is not None and not is_a(raw, functools.cached_property):
        return captured

    def called_of_base(*args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, owner), name)(*args, **kwargs)

    def called(subject: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            following = super(owner, subject)
        except TypeError:  # it is not an instance of the class
            return captured(subject, *args, **kwargs)
        if name == "__new__":
            return following.__new__(subject, *args, **kwargs)
        if place.part in ("fset", "fdel"):
            order = bases(type(subject))
            descriptor = among(order[[one is owner for one in order].index(True) + 1 :], name)
            return getattr(descriptor, "__set__" if args else "__delete__")(subject, *args)
        found = getattr(following, name)
        if type(found) is types.MethodWrapperType and found.__objclass__ is object and name == "__init__":
            return _initialise(subject, *args, **kwargs)
        return found if is_a(raw, (property, functools.cached_property)) else found(*args, **kwargs)

    is_static = is_a(raw, staticmethod) and name != "__new__"
    return calls_original(functools.update_wrapper(called_of_base if is_static else called, captured))


def _open_for_owner(place: AttributeReference) -> Opened:
    """Unwrap a method that an instance inherits from its class, or a class from its metaclass."""
    raw, owner = place.raw, place.owner
    if not is_class(owner) and place.name == "__call__":
        raise HookError(
            f"{place}: a call of an instance uses its class alone; hook the instance itself, or all of them "
            f"with '{class_name(type(owner))}.__call__'"
        )
    if is_a(raw, (staticmethod, classmethod)):
        return _itself(place, raw.__func__)
    if not callable(raw) or hasattr(type(raw), "__set__"):
        raise HookError(
            f"{place} is a {type(raw).__name__} of {type(owner).__qualname__}, which precedes the "
            f"instance's attributes; hook '{class_name(type(owner))}.{place.name}'"
        )
    return _itself(place, raw)


# -- binding ------------------------------------------------------------------------------------------------

_METHOD_MAKERS = (functools.partialmethod, functools.singledispatchmethod)
"""Descriptors that cannot be called: what they give adds arguments, or chooses a function by them."""


def _binding_of(raw: Any) -> Binding:
    if isinstance(raw, _METHOD_MAKERS):
        return _binding_of(raw.func)
    if isinstance(raw, functools.partial):  # binds since Python 3.14
        return "nothing" if sys.version_info < (3, 14) else "instance"
    if isinstance(raw, (staticmethod, types.MethodType)):
        return "nothing"
    if isinstance(raw, (classmethod, types.ClassMethodDescriptorType)):
        return "class"
    if not hasattr(type(raw), "__get__"):
        return "nothing"
    return "instance" if callable(raw) else "either"


def _bound_late(raw: Any) -> Any:
    """Return a function that takes explicitly the object that the descriptor would bind."""
    binding = _binding_of(raw)
    if raw is _OBJECT_INIT:
        return calls_original(_initialise)
    if binding == "nothing":
        return raw if callable(raw) else type(raw).__get__(raw, None, object)
    if type(raw) is types.FunctionType or isinstance(raw, CALLED_AS_BOUND):
        return raw

    def bind_and_call(subject: Any, /, *args: Any, **kwargs: Any) -> Any:
        from_class = binding == "class" or (binding == "either" and is_class(subject))
        bound_to = (None, subject) if from_class else (subject, type(subject))
        return type(raw).__get__(raw, *bound_to)(*args, **kwargs)

    return calls_original(bind_and_call)


_OBJECT_INIT: Any = vars(object)["__init__"]
_OBJECT_NEW: Any = object.__new__


def _initialise(self: Any, /, *args: Any, **kwargs: Any) -> None:
    """Call `object.__init__`, which ignores the arguments of a class's own `__new__` only if inherited."""
    if type(self).__new__ is _OBJECT_NEW:
        _OBJECT_INIT(self, *args, **kwargs)


# -- rebuilding --------------------------------------------------------------------------------------------


def rebuild(place: AttributeReference, woven: Mapping[str, Any], origin: Any = None) -> Any:
    """Return the attribute at ``place`` around the callables ``woven``, by part: "" but for properties.

    :param origin: what a property was before rebinding: returned where it has these functions.
    """
    raw, owner = place.raw, place.owner
    if is_a(raw, property):
        functions = {name: getattr(raw, name) for name in PROPERTY_PARTS}
        functions.update({part or "fget": function for part, function in woven.items()})
        return (
            _rebuilt(raw, *functions.values()) if origin is None else _with_functions(raw, functions, origin)
        )
    if not place.binds_to_owner:
        decorated = _decorated(place)
        if decorated is not None:
            return _rebuilt(raw, changed={id(decorated): woven[""]})
        return woven[""] if _kind_of(raw) is None else _rebuilt(raw, woven[""])
    if is_a(raw, staticmethod) or is_class(raw):
        return woven[""]
    if is_a(raw, classmethod):
        return types.MethodType(woven[""], type(owner))
    return OfMetaclass(woven[""]) if is_class(owner) else types.MethodType(woven[""], owner)


def _kind_of(raw: Any) -> type | None:
    return next((kind for kind in (property, staticmethod, classmethod) if is_a(raw, kind)), None)


_remade: dict[int, dict[str, Any]] = {}
"""The descriptors that rebinding has made, by id, each with the one that was there first."""


def descriptor_anew(descriptor: Any, new: Callable[..., Any]) -> Any:
    """Return a descriptor of the same type around new functions: the first one, if it has the same."""
    parts = PROPERTY_PARTS if is_a(descriptor, property) else ("__func__",)
    functions = {part: new(getattr(descriptor, part)) for part in parts}
    anew = _with_functions(descriptor, functions, _origin_of(descriptor))
    if anew is not descriptor:
        _remade.pop(id(descriptor), None)
    return anew


def _origin_of(descriptor: Any) -> Any:
    return _remade.get(id(descriptor), {}).get("origin", descriptor)


def _with_functions(descriptor: Any, functions: Mapping[str, Any], origin: Any) -> Any:
    for known in (descriptor, origin):
        if all(getattr(known, part) is function for part, function in functions.items()):
            return known
    return _noted(_rebuilt(descriptor, *functions.values()), origin)


def _noted(descriptor: Any, origin: Any) -> Any:
    if descriptor is not origin:
        _remade[id(descriptor)] = OwnDict(remade=descriptor, origin=origin)
    return descriptor


def _rebuilt(descriptor: Any, *functions: Any, changed: Mapping[int, Any] = MappingProxyType({})) -> Any:
    """Return a descriptor of the type of ``descriptor`` around other functions, with its attributes.

    Uses the constructor of its built-in base: that of a subclass may take other arguments.

    :param changed: what replaces its attributes, by the ids of their values.
    """
    kind: Any = _kind_of(descriptor) or object
    anew = kind.__new__(type(descriptor))
    kind.__init__(anew, *functions, *([descriptor.__doc__] if kind is property else ()))
    for slot, value in filled_slots(descriptor):
        slot.__set__(anew, changed.get(id(value), value))
    for name, value in namespace(descriptor).items():
        if name not in anew.__dict__:
            anew.__dict__[name] = changed.get(id(value), value)
    return anew
