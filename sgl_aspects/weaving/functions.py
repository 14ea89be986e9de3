"""What replaces a target: a Python function, or for other callables a proxy, and how its hooks are set.

A woven function is ``def f(*args, **kwargs)`` of the target's kind (plain, coroutine, generator, async
generator) with the target's signature, name, file and line. It keeps its identity while hooks come and go:
only its ``__code__`` changes, so every binding to it stays valid. It is a plain function and not a proxy,
because `torch.compile` traces through a function and silently bypasses a proxy.

The hooks are constants of the code, so one assignment swaps all of them: a call in progress keeps the hooks
with which it began, the next one gets the new ones, and no call takes a lock. The code has the free variables
of the target's own.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import logging
import pkgutil
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, Literal

import wrapt

from sgl_aspects import compat
from sgl_aspects.weaving.attributes import Attributes, OwnDict, holds
from sgl_aspects.weaving.chain import CompiledChain, NativeLink, calls_original, hidden
from sgl_aspects.weaving.hooks import FunctionKind, kind_of_code
from sgl_aspects.weaving.templates import Shape, template

logger = logging.getLogger("sgl_aspects")

# -- functions -----------------------------------------------------------------------------------------------

Observers = tuple[tuple[Any, Any, Any], ...]
"""(enter, exit, failed) for each observer, outermost first; enter or exit may be None.

``failed(error)`` handles their exceptions, and returns itself.
"""


class WovenFunction:
    """The function that replaces a target, and its hooks.

    :param original: the function whose name, documentation and attributes it copies.
    :param anonymous: ``original`` is a callable of another type; the function runs behind a proxy.
    :ivar code: the code last set by :meth:`set_hooks`, kept while others' code stands in its place.
    :ivar function: the replacement of the target.
    """

    __slots__ = (
        *("_body", "_calls", "_compiled", "_in_c", "_iterable", "_model", "_run", "_taken"),
        *("applied", "code", "function", "kind"),
    )

    code: types.CodeType

    def __init__(self, original: Any, *, anonymous: bool = False) -> None:
        self.kind = FunctionKind.of(original)
        self.applied = False
        self._calls = _Calls()
        self._in_c: Any = None
        self._taken: dict[str, Any] = OwnDict()
        self._compiled: CompiledChain | None = None
        code = _call_hooks.__code__ if anonymous else original.__code__
        self._model = code
        self._iterable = code.co_flags & inspect.CO_ITERABLE_COROUTINE
        is_seen = self.kind is not FunctionKind.PLAIN or not compat.HIDES_FRAMES
        self._body = _first_line(code) - code.co_firstlineno if is_seen and not anonymous else 0
        # torch.compile finds them as those of a module.
        namespace = globals() if anonymous else original.__globals__
        closure = () if anonymous else original.__closure__
        if self.kind is not kind_of_code(code):  # a function cannot change its kind later
            code = self._code(Shape(self.kind), {})
        # Not callable until set_hooks() assigns its code.
        self._run = types.FunctionType(code, namespace, code.co_name, None, closure)
        self.function: Any = self._run
        if not anonymous:
            self._run.__dict__ = {} if "__wrapped__" in original.__dict__ else Attributes()
            self.take_attributes(original)

    @property
    def calls(self) -> int:
        return int(getattr(self._calls, _COUNT)) + (0 if self._in_c is None else self._in_c.calls)

    @property
    def is_patched(self) -> bool:
        """Return whether others have given the function new code, which runs without hooks."""
        return self.applied and not holds(self._run.__code__.co_consts, self._calls)

    def set_hooks(self, head: Any, observers: Observers, guarded: bool = False, caller: Any = None) -> None:
        """Swap the hooks: from the next call on, ``head`` and ``observers`` run.

        :param guarded: torch.compile is loaded in this process, and may trace the function.
        :param caller: for a single observer: called with the function, ``head`` and the observer's parts, it
            makes the function's vectorcall run them without Python code, as long as its result is the last
            of the code's constants.
        """
        if guarded:
            self._compiled = self._compiled or CompiledChain(self._run.__globals__, self._calls)
            self._compiled.set(head)
        packed = isinstance(head, NativeLink)
        hooks = {"chain": _hashable(head.run if packed else head)}
        for index, triple in enumerate(observers):
            hooks |= zip((f"enter{index}", f"exit{index}", f"failed{index}"), triple)
        parts = tuple((enter is not None, leave is not None) for enter, leave, _ in observers)
        code = self._code(Shape(self.kind, parts, guarded, packed), hooks)
        before, self._in_c = self._in_c, None
        if caller is not None and self.kind is FunctionKind.PLAIN and not packed:
            self._in_c = caller(self._run, head, *observers[0])
            code = code.replace(co_consts=(*code.co_consts, self._in_c))
        if not self.is_patched:
            self._run.__code__ = self.code = code
        if before is not None:
            counted = float(before.calls)
            # In place, like the function itself: other threads may be counting.
            setattr(self._calls, _COUNT, getattr(self._calls, _COUNT) + counted)
        self.applied = True

    def release(self, head: Any, original: Any) -> None:
        """Remove all hooks of ``original``: remaining references to the function call ``head``."""
        if self._compiled is not None:
            self._compiled.set(head)
            self._compiled = None
        self.applied = False  # so that set_hooks() replaces the code of others, too
        self.set_hooks(head, ())
        if type(original) is types.FunctionType and weakref.getweakrefcount(self._run):
            # Weak references live as long as the original.
            kept = [*original.__dict__.get(_KEPT, ()), self._run]
            original.__dict__[_KEPT] = [one for one in kept if weakref.getweakrefcount(one)]

    def take_attributes(self, original: types.FunctionType) -> None:
        """Copy the attributes of ``original`` to the woven function."""
        self._taken = OwnDict({name: getattr(original, name) for name in _ATTRIBUTES})
        for name, value in self._taken.items():
            setattr(self.function, name, value)
        _copy_attributes(original, self.function)
        self.function.__dict__["__wrapped__"] = original.__dict__.get("__wrapped__", original)
        # Unless the original has them: `inspect` then follows those.
        if {"__wrapped__", "__signature__"}.isdisjoint(original.__dict__):
            self.function.__dict__["__signature__"] = Signature.of(self._run)

    def give_attributes(self, original: types.FunctionType) -> None:
        """Copy the attributes that were set on the woven function back to ``original``."""
        if type(self.function.__dict__.get("__signature__")) is Signature:
            del self.function.__dict__["__signature__"]
        for name, value in self._taken.items():
            if getattr(self.function, name) is not value:
                setattr(original, name, getattr(self.function, name))
        _copy_attributes(self.function, original)

    def _code(self, shape: Shape, hooks: dict[str, Any]) -> types.CodeType:
        """Return the code of ``shape`` with these hooks, and the model's names and lines."""
        model = self._model
        shape = shape._replace(free=len(model.co_freevars), body=self._body)
        code = template(shape)
        values = {f"<{name}>": hook for name, hook in hooks.items()}
        values["<calls>"] = self._calls
        names = tuple(_COUNT if name == "number" else name for name in code.co_names)
        if shape.guarded and self._compiled is not None:
            names = tuple(self._compiled.name if name == "_chain" else name for name in names)
        changes: dict[str, Any] = {
            "co_name": model.co_name,
            "co_filename": model.co_filename,
            "co_firstlineno": model.co_firstlineno,
            "co_names": (*names, *(name for name in model.co_names if name not in names)),
            "co_freevars": model.co_freevars,
            "co_varnames": _apart_from(model.co_freevars, code.co_varnames),
            "co_consts": tuple(
                values.get(const, const) if type(const) is str else const for const in code.co_consts
            ),
            # `await` accepts a generator only with the flag that types.coroutine sets.
            "co_flags": code.co_flags | self._iterable,
        }
        if sys.version_info >= (3, 11):
            changes["co_qualname"] = model.co_qualname
        return code.replace(**changes)


class Signature(inspect.Signature):
    """The signature of a woven function, read from its original on first access."""

    __slots__ = ("_function",)

    _function: Any

    @classmethod
    def of(cls, function: types.FunctionType) -> Signature:
        """Create it without the constructor, which `replace` and pickling call."""
        signature = cls.__new__(cls)
        signature._function = function
        return signature

    def __getattr__(self, name: str) -> Any:
        if name not in inspect.Signature.__slots__:
            raise AttributeError(name)
        read = inspect.signature(self._function.__wrapped__)
        for slot in inspect.Signature.__slots__:
            setattr(self, slot, getattr(read, slot))
        return getattr(self, name)


_COUNT = "None"
"""The attribute with the number of calls: `inspect.getclosurevars` ignores this name."""


class _Calls:
    """The number of calls: a float, because adding to it costs less than to an int; exact up to 2 ** 53."""

    __slots__ = ("__weakref__", _COUNT)

    def __init__(self) -> None:
        setattr(self, _COUNT, 0.0)


def are_constants(values: tuple[Any, ...]) -> bool:
    """Return whether they are of the code of a woven function; an observed original is one of them."""
    return any(type(value) is _Calls for value in values)


def _hashable(constant: Any) -> Any:
    """Return ``constant``, or a partial that calls it: debuggers hash the code of functions."""
    try:
        hash(constant)
    except Exception:  # noqa: BLE001  a user's __hash__ may raise anything
        return calls_original(functools.partial(constant))
    return constant


def _call_hooks(*args: Any, **kwargs: Any) -> Any:
    """The function behind a proxy, as tracebacks show it."""


def _first_line(code: types.CodeType) -> int:
    """Return the line of the first statement."""
    begin = code.co_firstlineno
    lines = (line for _, _, line in code.co_lines() if line is not None and line > begin)
    return next(lines, begin)


def _apart_from(taken: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    while not set(names).isdisjoint(taken):
        names = tuple(f"_{name}" for name in names)
    return names


# Without parameters of their names, the defaults fill in nothing; tools and rebinding look at them.
_ATTRIBUTES = (
    *("__name__", "__qualname__", "__module__", "__doc__"),
    *("__defaults__", "__kwdefaults__", "__annotations__"),
    *(("__type_params__",) if sys.version_info >= (3, 12) else ()),
)


_KEPT = "__sgl_aspects_released__"
_OWN = {"__wrapped__", _KEPT}


def _copy_attributes(source: types.FunctionType, target: types.FunctionType) -> None:
    given = _given_attributes(source)
    for name in _given_attributes(target).keys() - given.keys():
        del target.__dict__[name]
    target.__dict__.update(given)


def _given_attributes(function: types.FunctionType) -> dict[str, Any]:
    """Return the attributes but for those of a woven function itself: its original may be woven, too."""
    given = function.__dict__.items()
    return OwnDict((name, one) for name, one in given if name not in _OWN and type(one) is not Signature)


# -- proxies ------------------------------------------------------------------------------------------------


_LRU_CACHE: type = type(functools.lru_cache(maxsize=1)(len))
CALLED_AS_BOUND = (types.MethodDescriptorType, types.WrapperDescriptorType, _LRU_CACHE)
_PICKLED_BY_NAME = (
    *(types.FunctionType, types.BuiltinFunctionType, classmethod, staticmethod, functools.partial),
    *CALLED_AS_BOUND,
)

Binding = Literal["nothing", "instance", "class", "either"]
"""The object that is inserted before the arguments when an attribute of a class is called.

``either``: the instance or class that it is accessed on, for a descriptor that cannot be called itself.
"""


class BoundProxy(wrapt.ObjectProxy):  # type: ignore[type-arg]
    """Wraps what another package's descriptor gives; hooks get the bound object as an explicit argument.

    It is pickled and copied as the wrapped object.

    :param subject: the instance or class that it is bound to; None for a method accessed on its class.
    """

    def __init__(self, wrapped: Any, run: Callable[..., Any], subject: Any = None) -> None:
        super().__init__(wrapped)
        self._self_run = run if subject is None else types.MethodType(run, subject)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            result = self._self_run(*args, **kwargs)
            "The frame shows from here on."
            return result
        except BaseException:
            "The frame shows from here on."
            raise

    __call__.__code__ = hidden(__call__.__code__)

    def __copy__(self) -> Any:
        return self._copied(copy.copy(self.__wrapped__))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._copied(copy.deepcopy(self.__wrapped__, memo))

    def _copied(self, copied: Any) -> Any:
        return self if copied is self.__wrapped__ else copied

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduce = copyreg.dispatch_table.get(type(self.__wrapped__))
        return self.__wrapped__.__reduce_ex__(protocol) if reduce is None else reduce(self.__wrapped__)


class CallableProxy(BoundProxy):
    """The proxy of a callable, or of a descriptor that gives one; one per join point, never nested.

    Callables with a qualified name are pickled by it; an instance is pickled and copied as itself.
    """

    def __init__(self, wrapped: Any, run: Callable[..., Any], place: str, binding: Binding) -> None:
        super().__init__(wrapped, run)
        self._self_place, self._self_binding = place, binding

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if self._self_binding == "nothing":
            # Before Python 3.13, a classmethod calls the __get__ of its callable, with its class as both.
            return self if instance is None or instance is not owner else types.MethodType(self, owner)
        on_class = self._self_binding == "class" or (self._self_binding == "either" and instance is None)
        subject = owner if on_class else instance
        if isinstance(self.__wrapped__, CALLED_AS_BOUND):
            return self if subject is None else types.MethodType(self, subject)
        given = type(self.__wrapped__).__get__(self.__wrapped__, instance, owner)
        if callable(given):
            return BoundProxy(given, self._self_run, subject)
        _warn_of_value(self._self_place, type(given).__name__)
        return given

    def __reduce_ex__(self, protocol: Any) -> Any:
        has_name = isinstance(self.__wrapped__, _PICKLED_BY_NAME) and "instance." not in self._self_place
        return (pkgutil.resolve_name, (self._self_place,)) if has_name else super().__reduce_ex__(protocol)


@functools.cache
def _warn_of_value(place: str, kind: str) -> None:
    logger.warning(
        "%s gives a %s, which is not called, so its hooks do not run; hook what makes it", place, kind
    )


def passing_on(proxy: Any, called: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls what ``proxy`` wraps now: the owner of a patch below may remove it.

    :param called: what to call as long as none has been removed.
    """
    wrapped, reference = proxy.__wrapped__, weakref.ref(proxy)  # weak: nothing collects cycles through code

    def call(*args: Any, **kwargs: Any) -> Any:
        proxy = reference()
        now = wrapped if proxy is None else proxy.__wrapped__
        return (called if now is wrapped else now)(*args, **kwargs)

    return calls_original(call)


class WovenProxy(WovenFunction):
    """A proxy, and the function with the hooks behind it.

    :param called: the function to call for ``original``.
    """

    __slots__ = ()

    def __init__(self, original: Any, called: Callable[..., Any], place: str, binding: Binding) -> None:
        super().__init__(original, anonymous=True)
        self.function = CallableProxy(original, self._run, place, binding)
        self.set_hooks(called, ())
