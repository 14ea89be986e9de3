"""Kinds of attributes: taking the callable out of a descriptor, and putting a woven one back in.

A plain Python function, bare or inside a classmethod, staticmethod, property or cached_property, becomes a
generated function inside a new descriptor of the same type. Everything else that can be called (builtins,
lru_cache objects, partials, callable instances, other people's proxies) gets one proxy.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any

import wrapt

from sgl_aspects.errors import HookError
from sgl_aspects.weaving.codegen import Signature, WovenFunction

Rebuild = Callable[[Any], Any]
Observers = tuple[tuple[Any, Any, Any], ...]


def open_descriptor(raw: Any, part: str, described: str) -> tuple[Any, Rebuild]:
    """The callable inside ``raw``, and a function that makes ``raw`` anew around another callable.

    :raises HookError: there is nothing in ``raw`` that can be called.
    """
    if isinstance(raw, (classmethod, staticmethod)):
        return raw.__func__, lambda woven: _like(raw, type(raw)(woven))
    if isinstance(raw, property):
        return _open_property(raw, part or "fget", described)
    if isinstance(raw, functools.cached_property):
        return raw.func, lambda woven: _rebuilt_cached_property(raw, woven)
    if not callable(raw) and not hasattr(type(raw), "__get__"):
        raise HookError(
            f"{described} is {type(raw).__name__} {raw!r:.80}, which cannot be called, so not hooked"
        )
    return raw, lambda woven: woven


def _like(raw: Any, rebuilt: Any) -> Any:
    """Carry over what a subclass or a caller put on the descriptor itself."""
    for name, value in getattr(raw, "__dict__", {}).items():
        if name not in rebuilt.__dict__:
            rebuilt.__dict__[name] = value
    return rebuilt


def _open_property(raw: property, part: str, described: str) -> tuple[Any, Rebuild]:
    function = getattr(raw, part)
    if function is None:
        have = ", ".join(name for name in ("fget", "fset", "fdel") if getattr(raw, name) is not None)
        raise HookError(f"{described}: the property has no {part}; it has {have}")

    def rebuild(woven: Any) -> property:
        functions = {name: getattr(raw, name) for name in ("fget", "fset", "fdel")}
        functions[part] = woven
        make: Any = type(raw)
        rebuilt: property = make(*functions.values(), raw.__doc__)
        return rebuilt

    return function, rebuild


def _rebuilt_cached_property(
    raw: functools.cached_property[Any], woven: Any
) -> functools.cached_property[Any]:
    rebuilt = copy.copy(raw)
    rebuilt.func = woven
    return rebuilt


class CallableProxy(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Stands for a callable that is no plain Python function; one per join point, never nested.

    It binds as what it wraps does, and pickles by the qualified name it can be found under.
    """

    def __init__(self, wrapped: Any, place: str) -> None:
        super().__init__(wrapped)
        self._self_place = place
        self._self_calls = 0
        self._self_hooks: tuple[Any, Observers] = (wrapped, ())

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self._self_calls += 1
        head, observers = self._self_hooks
        if not observers:
            return head(*args, **kwargs)
        return _observed_call(head, observers, args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None or not hasattr(type(self.__wrapped__), "__get__"):
            return self
        return types.MethodType(self, instance)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        module, _, path = self._self_place.partition(":")
        if not module or "instance." in path:
            raise pickle.PicklingError(
                f"{self!r} was hooked on an instance: it has no name to be found under"
            )
        return (_found_by_name, (module, path))


def _found_by_name(module: str, path: str) -> Any:
    import importlib

    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _observed_call(head: Any, observers: Observers, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    entered = []
    for enter, leave, failed in observers:
        try:
            entered.append((leave, failed, enter(args, kwargs)))
        except Exception as error:  # noqa: BLE001  an observer never breaks the call
            failed(error)
    try:
        result = head(*args, **kwargs)
    except BaseException as error:
        _leave(entered, None, error)
        raise
    _leave(entered, result, None)
    return result


def _leave(entered: list[tuple[Any, Any, Any]], result: Any, error: BaseException | None) -> None:
    for leave, failed, token in reversed(entered):
        try:
            leave(token, result, error)
        except Exception as broken:  # noqa: BLE001  an observer never breaks the call
            failed(broken)


class WovenProxy:
    """The steering of a :class:`CallableProxy`: the same face as :class:`WovenFunction`."""

    steered = True

    def __init__(self, original: Any, place: str) -> None:
        self.function = CallableProxy(original, place)

    @property
    def calls(self) -> int:
        count: int = self.function._self_calls
        return count

    def steer(
        self, head: Any, observers: Observers, *, signature: Signature | None = None, compiling: Any = None
    ) -> None:
        """Swap the hooks; the other arguments are for generated functions."""
        del signature, compiling
        self.function._self_hooks = (head, observers)


Woven = WovenFunction | WovenProxy


def weave_callable(original: Any, place: str) -> Woven:
    """A stand-in for ``original`` that can be steered."""
    if isinstance(original, types.FunctionType) and not _parameters_hidden(original):
        return WovenFunction(original)
    return WovenProxy(original, place)


def _parameters_hidden(function: types.FunctionType) -> bool:
    """Comprehension-like code has parameters that no source text can name."""
    code = function.__code__
    return not all(name.isidentifier() for name in code.co_varnames[: code.co_argcount])


def is_awaited(original: Any) -> bool:
    """Whether calling ``original`` gives a coroutine."""
    return inspect.iscoroutinefunction(original)
