"""Woven functions: the Python function that replaces a target, and how its hooks are set.

A woven function is ``def f(*args, **kwargs)`` of the target's kind (plain, coroutine, generator, async
generator) with the target's signature, name, file and line. It keeps its identity while hooks come and go:
only its ``__code__`` changes, so every binding to it stays valid. It is a plain function and not a proxy,
because `torch.compile` traces through a function and silently bypasses a proxy.

The hooks are constants of the code, so one assignment swaps all of them: a call in progress keeps the hooks
with which it began, the next one gets the new ones, and no call takes a lock. The code has the names and free
variables of the target's own, so that `inspect.getclosurevars` and debuggers show the target.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
import weakref
from typing import Any

from sgl_aspects import compat
from sgl_aspects.weaving.attributes import Attributes, OwnDict, holds
from sgl_aspects.weaving.chain import CompiledChain, NativeLink, calls_original
from sgl_aspects.weaving.templates import FunctionKind, Shape, kind_of_code, template

logger = logging.getLogger("sgl_aspects")

Observers = tuple[tuple[Any, Any, Any], ...]
"""(enter, exit, failed) for each observer, outermost first; enter or exit may be None.

``failed(error)`` handles their exceptions, and returns itself.
"""


class WovenFunction:
    """The function that replaces a target, and its hooks.

    :param original: the function whose name, documentation and attributes it copies.
    :param anonymous: ``original`` is a callable of another type; the function runs behind a proxy.
    :ivar code: its code. Others may give it a copy, which needs the chain that lives as long as this.
    :ivar function: the replacement of the target.
    """

    __slots__ = (
        *("_body", "_calls", "_compiled", "_in_c", "_iterable", "_model", "_run", "_signature", "_taken"),
        *("applied", "code", "function", "kind"),
    )

    code: types.CodeType

    def __init__(self, original: Any, *, anonymous: bool = False) -> None:
        self.kind = FunctionKind.of(original)
        self.applied = False
        self._calls = _Calls()
        self._in_c: Any = None
        self._signature: _Signature | None = None
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
            self._run.__dict__ = Attributes()
            self._signature = _Signature.of(self._run)
            self.take_attributes(original)

    @property
    def calls(self) -> int:
        return int(getattr(self._calls, _COUNT)) + (0 if self._in_c is None else self._in_c.calls)

    @property
    def is_patched(self) -> bool:
        """Return whether others have given the function new code, which runs without hooks."""
        return self.applied and not holds(self._run.__code__.co_consts, self._calls)

    def set_hooks(self, head: Any, observers: Observers, compiling: Any = None, caller: Any = None) -> None:
        """Swap the hooks: from the next call on, ``head`` and ``observers`` run.

        :param compiling: torch's ``is_compiling``, once torch.compile is loaded in this process.
        :param caller: for a single observer: called with the function, ``head`` and the observer's parts, it
            makes the function's vectorcall run them without Python code, as long as its result is the last
            of the code's constants.
        """
        if compiling is not None:
            self._compiled = self._compiled or CompiledChain(self._run.__globals__)
        packed = isinstance(head, NativeLink)
        hooks = {"chain": _hashable(head.run if packed else head)}
        for index, triple in enumerate(observers):
            hooks |= zip((f"enter{index}", f"exit{index}", f"failed{index}"), triple)
        parts = tuple((enter is not None, leave is not None) for enter, leave, _ in observers)
        code = self._code(Shape(self.kind, parts, compiling is not None, packed), hooks)
        before, self._in_c = self._in_c, None
        if caller is not None and self.kind is FunctionKind.PLAIN and not packed:
            self._in_c = caller(self._run, head, *observers[0])
            code = code.replace(co_consts=(*code.co_consts, self._in_c))
        if self._compiled is not None and compiling is not None:
            self._compiled.set(head, compiling, code)
        if not self.is_patched:
            self._run.__code__ = self.code = code
        if before is not None:
            counted = float(before.calls)
            setattr(
                self._calls, _COUNT, getattr(self._calls, _COUNT) + counted
            )  # in place, like the function itself: other threads may be counting
        self.applied = True

    def release(self, head: Any) -> None:
        """Remove all hooks: remaining references to the function call ``head``."""
        self.applied = False
        self.set_hooks(head, ())
        original = self._run.__dict__.get("__wrapped__")
        if type(original) is types.FunctionType and weakref.getweakrefcount(self._run):
            # Weak references live as long as the original.
            kept = [*original.__dict__.get(_KEPT, ()), self._run]
            original.__dict__[_KEPT] = [one for one in kept if weakref.getweakrefcount(one)]
        if self._compiled is not None and self.kind is FunctionKind.PLAIN:
            self._compiled.remove()
        self._compiled = None

    def take_attributes(self, original: types.FunctionType) -> None:
        """Copy the attributes of ``original`` to the woven function."""
        self._taken = OwnDict({name: getattr(original, name) for name in _ATTRIBUTES})
        for name, value in self._taken.items():
            setattr(self.function, name, value)
        _copy_attributes(original, self.function)
        self.function.__dict__["__wrapped__"] = original
        # Unless the original has them: `inspect` then follows those.
        if {"__wrapped__", "__signature__"}.isdisjoint(original.__dict__):
            self.function.__dict__["__signature__"] = self._signature

    def give_attributes(self, original: types.FunctionType) -> None:
        """Copy the attributes that were set on the woven function back to ``original``."""
        if self.function.__dict__.get("__signature__") is self._signature:
            self.function.__dict__.pop("__signature__", None)
        for name, value in self._taken.items():
            if getattr(self.function, name) is not value:
                setattr(original, name, getattr(self.function, name))
        _copy_attributes(self.function, original)
        if self.is_patched:
            logger.warning("%s: the __code__ that others gave it goes with its hooks", original.__qualname__)

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


class _Signature(inspect.Signature):
    """The signature of a woven function, read from its original on first access."""

    __slots__ = ("_function",)

    _function: Any

    @classmethod
    def of(cls, function: types.FunctionType) -> _Signature:
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

    __slots__ = (_COUNT,)

    def __init__(self) -> None:
        setattr(self, _COUNT, 0.0)


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
    for name in target.__dict__.keys() - source.__dict__.keys() - _OWN:
        del target.__dict__[name]
    for name, value in list(source.__dict__.items()):
        if name not in _OWN:
            target.__dict__[name] = value
