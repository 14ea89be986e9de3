"""Hooks: their types, their order, and the rules that say which may be attached where."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import functools
import inspect
import itertools
import logging
import os
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from sgl_aspects.errors import HookError, Stop
from sgl_aspects.terminal import say
from sgl_aspects.weaving.attributes import claims_to_be, is_a, is_class
from sgl_aspects.weaving.targets import Target

logger = logging.getLogger("sgl_aspects")

Hook = Callable[..., Any]


class HookType(enum.Enum):
    """The types of hooks: when they run, and what they may do.

    The first four have SGLang's names and signatures.
    """

    BEFORE = "before"
    """``fn(*args, **kwargs) -> None | (args, kwargs)``: may change the arguments."""
    AFTER = "after"
    """``fn(result, *args, **kwargs) -> None | new result``: may change the result."""
    AROUND = "around"
    """``fn(original_fn, *args, **kwargs) -> result``: may do everything."""
    REPLACE = "replace"
    """A function, or a class for a class target, that replaces the target."""
    NATIVE = "native"
    """``fn(proceed, args, kwargs) -> result`` with ``proceed(args, kwargs)``: AROUND without repacking."""
    OBSERVE = "observe"
    """An :class:`Observer`: cannot change the call."""


class Observer(Protocol):
    """The interface of OBSERVE hooks: two methods, called before and after the target.

    For coroutines and generators, the second is called when they end. An exception in either method is
    counted and logged once, and does not affect the engine's call.

    An observer may have only one of the two methods, the other one absent or None: it is not called, and
    exit() without enter() gets None as its token. An observer may have a method
    ``bound_to(function) -> Observer``: it is called for each function that the hook is woven on, and its
    result observes that function. It raises ``HookError`` if it cannot.
    """

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        """Called first; its result is passed to :meth:`exit`."""

    def exit(self, token: Any, result: Any, error: BaseException | None, /) -> None:
        """Called last, with the result, or with the exception that the call is about to raise."""


class Result(NamedTuple):
    """The value of an AFTER hook that changes the result to None: a plain None leaves it unchanged."""

    value: Any


class HookSource(NamedTuple):
    """The plugin that registered a hook: its entry point's name and its distribution."""

    plugin_name: str
    dist_name: str | None = None

    def __str__(self) -> str:
        return f"{self.plugin_name} ({self.dist_name})" if self.dist_name else self.plugin_name


current_source: contextvars.ContextVar[HookSource | None] = contextvars.ContextVar(
    "sgl_aspects_hook_source", default=None
)
"""The plugin being loaded; :class:`Advice` takes its source from here."""


class State(str, enum.Enum):
    """The state of a hook."""

    PENDING = "pending"
    """Its module is not loaded yet, or has not made the attribute."""
    WOVEN = "woven"
    DISABLED = "disabled"
    MISSING = "missing"
    """The module is loaded and has no such attribute."""
    FAILED = "failed"
    """The attribute exists but cannot take this hook."""
    REMOVED = "removed"


_sequence = itertools.count(1)


class Advice:
    """A hook and its target. An advice can be woven once at a time; weaving returns a handle.

    :param order: lower is nearer to the target; equal orders run in registration order, later ones outside.
    :param required: if the target is missing, the process stops and prints the reason.
    :param on_lost: called with the reason, instead of a warning, if no later import can help.
    :ivar caller: makes a plain function call its only observer in C (:meth:`.WovenFunction.set_hooks`).
    :ivar errors: the number of an observer's exceptions that were contained.
    :ivar sequence: increases with each advice.

    The weaver alone changes these:

    :ivar state, detail: where the hook stands, and why it is not woven.
    :ivar rank: the alternate of the target that is woven; None if there is none yet.
    :ivar absent: why alternates can never be woven, by their ranks.
    :ivar points: the join points, each with its number of calls before the hook was added.
    """

    __slots__ = (
        *("target", "hook_type", "hook", "order", "source", "required", "on_lost"),
        *("caller", "enabled", "errors", "sequence", "state", "detail", "rank", "absent", "points"),
    )

    def __init__(
        self,
        target: Target,
        hook_type: HookType,
        hook: Any,
        order: int = 0,
        source: HookSource | None = None,
        required: bool = False,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        _check_hook(hook, hook_type, target)
        if not isinstance(order, int):
            raise HookError(f"{target}: order = {order!r}: write a whole number")
        self.target, self.hook_type, self.hook, self.order = target, hook_type, hook, order
        self.source = source or current_source.get()
        self.required, self.on_lost = required, on_lost
        self.caller: Callable[..., Any] | None = None
        self.errors = 0
        self.sequence = next(_sequence)
        self.points: list[tuple[Any, Any]] = []
        self.forget()

    def forget(self) -> None:
        """Return to the state before it was woven."""
        self.enabled, self.state, self.detail = True, State.REMOVED, ""
        self.rank: int | None = None
        self.absent: dict[int, str] = {}

    def with_hook(self, hook: Any) -> Advice:
        """Return the same advice with another hook, not woven."""
        anew = Advice(self.target, self.hook_type, hook, self.order, self.source, self.required, self.on_lost)
        anew.sequence = self.sequence
        return anew

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as not woven: cloudpickle takes hooks along with a function that no module names."""
        given = (self.target, self.hook_type, self.hook, self.order, self.source, self.required, self.on_lost)
        return Advice, given

    @property
    def name(self) -> str:
        """The hook's own name, for messages."""
        try:
            return f"{self.hook.__module__}.{self.hook.__qualname__}"
        except Exception:  # noqa: BLE001  an instance may answer in any way; its class has these names
            return f"{type(self.hook).__module__}.{type(self.hook).__qualname__}"

    def __str__(self) -> str:
        origin = f" from {self.source}" if self.source else ""
        return f"{self.hook_type.value} hook {self.name}{origin} on {self.target}"

    @property
    def is_class_replacement(self) -> bool:
        return self.hook_type is HookType.REPLACE and is_class(self.hook)

    def __call__(self, error: Exception) -> Advice:
        """Count an observer's exception, log the first (`failed` in templates); returns itself, the token."""
        self.errors += 1
        if self.errors == 1:
            logger.warning(
                "%s raised %r; the call went on without it, later errors are only counted",
                self,
                error,
                exc_info=error,
            )
        return self

    def fail(self, fault: HookError, *, strict: bool) -> None:
        """Note that the target cannot take the hook.

        :raises HookError: ``fault``, if ``strict``.
        """
        known = self.state is State.FAILED and self.detail == str(fault)
        self.state, self.detail = State.FAILED, str(fault)
        if strict:
            raise fault
        if not known:
            self._report_lost("failed")

    def note_absent(self, rank: int, detail: str) -> None:
        """Note that an alternate can never be woven; if none can, the hook is missing."""
        if self.points:
            return
        known = self.absent.get(rank) == detail
        self.absent[rank] = detail
        self.detail = "; ".join(self.absent[rank] for rank in sorted(self.absent))
        if len(self.absent) < len(self.target.alternates):
            self.detail += "; the other alternates are not loaded yet"
            return
        self.state = State.MISSING
        if not known and not self.required:
            self._report_lost("is not woven")

    def _report_lost(self, what: str) -> None:
        if self.on_lost is not None:
            self.on_lost(self.detail)
        else:
            logger.warning("%s %s: %s", self, what, self.detail)


LOST = (State.MISSING, State.FAILED)
"""No later import can make such a hook work."""


def stop_without(lost: Iterable[Advice]) -> None:
    """End the process: a required hook that is missing must not go unnoticed."""
    message = "; ".join(f"required {advice}: {advice.detail}" for advice in dict.fromkeys(lost))
    message += (
        ". Correct the target, add the name that this version has as an alternate ('a:f | b:g'), "
        "or do without required=True"
    )
    logger.critical("%s", message)
    error = Stop(message)
    if threading.current_thread() is threading.main_thread():
        raise error
    # SystemExit in another thread would end only that thread.
    say(str(error))
    os._exit(1)


class FunctionKind(enum.Enum):
    """The kind of a function, by the result of a call; the woven function is of the same kind."""

    PLAIN = "plain"
    COROUTINE = "coroutine"
    GENERATOR = "generator"
    ASYNC_GENERATOR = "async generator"

    @classmethod
    def of(cls, function: Any) -> FunctionKind:
        """Return the kind of a function, a partial or method around one, or an instance's ``__call__``."""
        if claims_to_be(function, (functools.partial, functools.partialmethod)):
            return cls.of(function.func)
        if claims_to_be(function, (types.MethodType, classmethod, staticmethod)):
            return cls.of(function.__func__)
        code: Any = function.__code__ if claims_to_be(function, types.FunctionType) else None
        if is_a(code, types.CodeType):
            kind = kind_of_code(code)
        else:  # a mock object's is none
            call = inspect.getattr_static(type(function), "__call__", None)
            kind = cls.of(call) if claims_to_be(call, types.FunctionType) else cls.PLAIN
        with contextlib.suppress(Exception):  # an object may answer in any way
            if kind is cls.PLAIN and inspect.iscoroutinefunction(function):
                return cls.COROUTINE
        return kind


def kind_of_code(code: types.CodeType) -> FunctionKind:
    flags = code.co_flags
    if flags & inspect.CO_COROUTINE:
        return FunctionKind.COROUTINE
    if flags & inspect.CO_ASYNC_GENERATOR:
        return FunctionKind.ASYNC_GENERATOR
    return FunctionKind.GENERATOR if flags & inspect.CO_GENERATOR else FunctionKind.PLAIN


def _check_hook(hook: Any, hook_type: object, target: Target) -> None:
    """Raise :class:`HookError`, with the fix, if ``hook`` can never work as ``hook_type``."""
    if not isinstance(hook_type, HookType):
        choices = ", ".join(kind.name for kind in HookType)
        raise HookError(f"{target}: {hook_type!r} is not a HookType; choose one of {choices}")
    if hook_type is HookType.OBSERVE:
        parts = [getattr(hook, name, None) for name in ("enter", "exit")]
        parts.append(getattr(type(hook), "bound_to", None))  # as join points look it up
        fault = None
        if is_class(hook):
            fault = "is a class: pass an instance"
        elif not any(map(callable, parts)):
            fault = "has neither enter() nor exit()"
        elif not all(part is None or callable(part) for part in parts):
            fault = "has an enter or exit that cannot be called"
        if fault:
            raise HookError(
                f"{target}: the observer {hook!r} {fault}; it needs enter(args, kwargs), exit(...) or both"
            )
    elif is_class(hook):
        if hook_type is not HookType.REPLACE:
            raise HookError(
                f"{target}: class {hook.__name__} can only be a REPLACE hook, not {hook_type.name}; "
                "use a function to hook a function"
            )
    elif not callable(hook):
        raise HookError(f"{target}: the hook {hook!r} cannot be called")
    elif hook_type in _FIRST and not _takes_positional(hook, _FIRST[hook_type].count(",") + 1):
        raise HookError(
            f"{target}: {hook!r} does not take what {hook_type.name} hooks get; "
            f"write def hook({_FIRST[hook_type]}{_MORE[hook_type]})"
        )


_FIRST = {
    HookType.AROUND: "original_fn",
    HookType.AFTER: "result",
    HookType.NATIVE: "proceed, args, kwargs",
}
_MORE = {HookType.AROUND: ", *args, **kwargs", HookType.AFTER: ", *args, **kwargs", HookType.NATIVE: ""}


def _takes_positional(hook: Any, count: int) -> bool:
    """Return whether a plain function or method takes ``count`` arguments by position; True if unknown."""
    function = hook.__func__ if type(hook) is types.MethodType else hook
    code = function.__code__ if type(function) is types.FunctionType else None
    if code is None or code.co_flags & inspect.CO_VARARGS:
        return True
    return bool(code.co_argcount - (hook is not function) >= count)


def innermost_first(advices: Iterable[Advice]) -> list[Advice]:
    """Sort the hooks of a join point.

    REPLACE is innermost, then ``order`` ascends outwards; of equal orders, the one registered later is
    outside.
    """
    return sorted(
        advices, key=lambda advice: (advice.hook_type is not HookType.REPLACE, advice.order, advice.sequence)
    )


# -- reading an argument -------------------------------------------------------------------------------------

ArgumentReader = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def argument_reader(function: Callable[..., Any], parameter: str) -> ArgumentReader:
    """Return a reader of ``parameter`` in calls of ``function``: its default, or None, if a call omits it.

    :raises HookError: ``function`` has no such parameter, or no signature.
    """
    try:
        # The wrapped function may have other parameters than the one that is called.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError) as error:
        raise HookError(f"no parameter {parameter!r} can be read: {function!r} has no signature") from error
    if parameter not in signature.parameters:
        name = getattr(function, "__qualname__", None) or repr(function)
        choices = ", ".join(signature.parameters) or "it has none"
        raise HookError(f"{name} has no parameter {parameter!r}; choose from: {choices}")
    found = signature.parameters[parameter]
    default = None if found.default is found.empty else found.default
    position = list(signature.parameters).index(parameter)

    def read_variadic(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return signature.bind(*args, **kwargs).arguments.get(parameter)
        except TypeError:  # the call itself raises it, too
            return None

    if found.kind in (found.VAR_POSITIONAL, found.VAR_KEYWORD):
        return read_variadic
    if found.kind is found.KEYWORD_ONLY:
        return lambda args, kwargs: kwargs.get(parameter, default)
    if found.kind is found.POSITIONAL_ONLY:  # a keyword of this name belongs to **kwargs
        return lambda args, kwargs: args[position] if position < len(args) else default
    return lambda args, kwargs: args[position] if position < len(args) else kwargs.get(parameter, default)
