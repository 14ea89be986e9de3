"""Proxies for callables other than plain Python functions.

Builtins, lru_cache objects, partials, callable instances, singledispatchmethods and other people's proxies
keep their type, attributes and equality. A call is passed to a generated function, see functions.py.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import logging
import sys
import types
from collections.abc import Callable
from typing import Any, Literal

import wrapt

from sgl_aspects.weaving.attributes import is_class
from sgl_aspects.weaving.chain import calls_original
from sgl_aspects.weaving.functions import WovenFunction

logger = logging.getLogger("sgl_aspects")

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
