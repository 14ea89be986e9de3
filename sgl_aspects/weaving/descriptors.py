"""Descriptors: unwrapping the callable of an attribute, and rebuilding the descriptor around a woven one.

A plain Python function, bare or inside a classmethod, staticmethod, property or cached_property, becomes a
woven function inside a new descriptor of the same type. Other callables (builtins, lru_cache objects,
partials, instances, other people's proxies) get a proxy, which keeps their type, attributes and equality.

Types are tested by `type()`, never by `isinstance`: a foreign proxy claims the class of what it wraps.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import logging
import reprlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal

import wrapt

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
    is_a,
    is_class,
    namespace,
)
from sgl_aspects.weaving.chain import calls_original
from sgl_aspects.weaving.functions import WovenFunction

logger = logging.getLogger("sgl_aspects")

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
    """Return a function that calls the method of the owner's class, with the hooks that it has by then."""
    cls, name = type(place.owner), place.name
    lookup: Any = type(cls).__getattribute__
    if lookup is not type.__getattribute__ or not is_a(place.raw, types.FunctionType):
        return content  # type: ignore[no-any-return]
    return calls_original(lambda *args, **kwargs: getattr(cls, name)(*args, **kwargs))


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


# -- binding ------------------------------------------------------------------------------------------------

_LRU_CACHE: type = type(functools.lru_cache(maxsize=1)(len))
_CALLED_AS_BOUND = (types.MethodDescriptorType, types.WrapperDescriptorType, _LRU_CACHE)
_PICKLED_BY_NAME = (
    *(types.FunctionType, types.BuiltinFunctionType, classmethod, staticmethod, functools.partial),
    *_CALLED_AS_BOUND,
)


Binding = Literal["nothing", "instance", "class", "either"]
"""The object that is inserted before the arguments when an attribute of a class is called.

``either``: the instance or class that it is accessed on, for a descriptor that is not callable itself.
"""


def _binding_of(raw: Any) -> Binding:
    if isinstance(raw, (functools.singledispatchmethod, functools.partialmethod)):
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


def bound_late(raw: Any, owner: type) -> Callable[..., Any]:
    """Return a function that takes explicitly the object that the descriptor would bind."""
    if type(raw) is types.FunctionType:
        return raw
    binding = _binding_of(raw)
    if binding == "nothing":
        return raw if callable(raw) else _bound(raw, None, owner)
    if isinstance(raw, _CALLED_AS_BOUND):
        return _without_surplus(raw)
    from_class = {"class": True, "instance": False}.get(binding)

    def bind_and_call(subject: Any, /, *args: Any, **kwargs: Any) -> Any:
        if is_class(subject) if from_class is None else from_class:
            return _bound(raw, None, subject)(*args, **kwargs)
        return _bound(raw, subject, type(subject))(*args, **kwargs)

    return calls_original(bind_and_call)


def _bound(raw: Any, instance: Any, owner: Any) -> Callable[..., Any]:
    bound: Callable[..., Any] = type(raw).__get__(raw, instance, owner)
    return bound


_OBJECT_INIT: Any = vars(object)["__init__"]
_OBJECT_NEW: Any = object.__new__


def _without_surplus(raw: Any) -> Callable[..., Any]:
    """Wrap `object.__init__` to ignore the arguments of a class's own `__new__`, as if it was inherited."""
    if raw is not _OBJECT_INIT:
        called: Callable[..., Any] = raw
        return called

    def initialise(self: Any, /, *args: Any, **kwargs: Any) -> None:
        if type(self).__new__ is _OBJECT_NEW:
            raw(self, *args, **kwargs)

    return calls_original(initialise)


# -- proxies ------------------------------------------------------------------------------------------------


class BoundProxy(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Wraps the result of a foreign descriptor; hooks get the bound object explicitly.

    It is pickled and copied as the wrapped object.

    :param subject: the instance or class that it is bound to; None for a method accessed on its class.
    """

    def __init__(self, wrapped: Any, run: Callable[..., Any], subject: Any = None) -> None:
        super().__init__(wrapped)
        self._self_run = run if subject is None else types.MethodType(run, subject)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._self_run(*args, **kwargs)

    def __copy__(self) -> Any:
        import copy  # rarely needed

        return self._copied(copy.copy(self.__wrapped__))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        return self._copied(copy.deepcopy(self.__wrapped__, memo))

    def _copied(self, copied: Any) -> Any:
        return self if copied is self.__wrapped__ else copied

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduce = copyreg.dispatch_table.get(type(self.__wrapped__))
        return self.__wrapped__.__reduce_ex__(protocol) if reduce is None else reduce(self.__wrapped__)


class CallableProxy(BoundProxy):
    """The proxy of a callable; one per join point, never nested.

    Callables with a qualified name are pickled by it; an instance is pickled and copied as itself.
    """

    def __init__(self, wrapped: Any, run: Callable[..., Any], place: str) -> None:
        super().__init__(wrapped, run)
        self._self_place = place
        self._self_binding = _binding_of(wrapped)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if self._self_binding == "nothing":
            # Before Python 3.13, a classmethod calls the __get__ of its callable, with its class as both.
            return self if instance is None or instance is not owner else types.MethodType(self, owner)
        subject = owner if self._self_binding == "class" else instance
        if self._self_binding == "either" and instance is None:
            subject = owner
        elif isinstance(self.__wrapped__, _CALLED_AS_BOUND):
            return self if subject is None else types.MethodType(self, subject)
        bound: Any = _bound(self.__wrapped__, instance, owner)
        if callable(bound):
            return BoundProxy(bound, self._self_run, subject)
        _warn_of_value(self._self_place, type(bound).__name__)
        return bound

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not isinstance(self.__wrapped__, _PICKLED_BY_NAME):
            return super().__reduce_ex__(protocol)
        module, _, path = self._self_place.partition(":")
        if not module or "instance." in path:
            import pickle  # slow to import

            raise pickle.PicklingError(
                f"{self!r} was hooked on an instance: it has no name to be found under"
            )
        return (found_by_name, (module, path))


@functools.cache
def _warn_of_value(place: str, kind: str) -> None:
    logger.warning(
        "%s gives a %s, which is not called, so its hooks do not run; hook what makes it", place, kind
    )


def found_by_name(module: str, path: str) -> Any:
    """Return the object at ``module:path`` in the process that unpickles it."""
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def passing_on(proxy: Any, called: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls what ``proxy`` wraps now: the owner of a patch below may remove it.

    :param called: what to call as long as none has been removed.
    """
    wrapped = proxy.__wrapped__

    def call(*args: Any, **kwargs: Any) -> Any:
        now = proxy.__wrapped__
        return (called if now is wrapped else now)(*args, **kwargs)

    return calls_original(call)


class WovenProxy(WovenFunction):
    """A proxy, and the function with the hooks behind it.

    :param called: the function to call for ``original``.
    """

    __slots__ = ()

    def __init__(self, original: Any, called: Callable[..., Any], place: str) -> None:
        super().__init__(original, anonymous=True)
        self.function = CallableProxy(original, self._run, place)
        self.set_hooks(called, ())
