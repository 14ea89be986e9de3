"""Hooks: their types, the rules that say which may be attached where, and the chain that runs them.

Each link of a chain is called with the target's own arguments. An AROUND link is
`types.MethodType(hook, next)`: it runs `hook(next, *args, **kwargs)` with no Python frame of ours in between.
"""

from __future__ import annotations

import contextvars
import enum
import inspect
import itertools
import logging
import reprlib
import sys
import types
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from sgl_aspects.errors import HookError
from sgl_aspects.weaving.attributes import is_class
from sgl_aspects.weaving.targets import Target

logger = logging.getLogger("sgl_aspects")

Hook = Callable[..., Any]


class HookType(enum.Enum):
    """When a hook runs, and what it may do.

    The first four have SGLang's names and signatures.
    """

    BEFORE = "before"
    """``fn(*args, **kwargs) -> None | (args, kwargs)``: may change the arguments."""
    AFTER = "after"
    """``fn(result, *args, **kwargs) -> None | new result``: may change the result."""
    AROUND = "around"
    """``fn(original_fn, *args, **kwargs) -> result``: may do everything."""
    REPLACE = "replace"
    """A function, or a class for a class target, that takes the place of the target."""
    NATIVE = "native"
    """``fn(proceed, args, kwargs) -> result`` with ``proceed(args, kwargs)``: AROUND without repacking."""
    OBSERVE = "observe"
    """An :class:`Observer`: looks, and can change nothing."""


class Observer(Protocol):
    """What OBSERVE hooks are: a pair of calls around the whole life of the target's call.

    For coroutines and generators that life ends when they do. An exception in either method is counted
    and logged once; the engine's call goes through all the same.

    An observer may have only one of the two methods, the other one absent or None: it is not called, and
    exit() without enter() gets None as its token. An observer may have a method
    ``bound_to(function) -> Observer``: it is called for each function that the hook is woven on, and its
    result observes that function. It raises ``HookError`` if it cannot.
    """

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Any:
        """Called first; what it returns is handed to :meth:`exit`."""

    def exit(self, token: Any, result: Any, error: BaseException | None, /) -> None:
        """Called last, with the result, or with the exception that the call is about to raise."""


class Result(NamedTuple):
    """An AFTER hook returns ``Result(None)`` to make the result None: None alone leaves it as it is."""

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
    """What has become of a hook."""

    PENDING = "pending"
    """Its module is not loaded yet."""
    WOVEN = "woven"
    DISABLED = "disabled"
    MISSING = "missing"
    """The module is loaded and has no such attribute."""
    FAILED = "failed"
    """The attribute is there and cannot take this hook."""
    REMOVED = "removed"


_sequence = itertools.count(1)


class Advice:
    """One hook and where it goes. Weaving it gives a handle; the same advice can be woven once at a time.

    :param order: lower is nearer to the target; equal orders run in registration order, later ones outside.
    :param required: if the target turns out to be missing, the process stops and prints the reason.
    :param on_lost: called with the reason instead of a warning, where nothing that loads later can help.
    :ivar caller: calls an observer in C where it is the only hook (:meth:`.WovenFunction.set_hooks`).
    :ivar errors: how many exceptions of an observer were contained.
    :ivar sequence: a number that grows with each advice.
    """

    __slots__ = (
        *("target", "hook_type", "hook", "order", "source", "required", "on_lost"),
        *("caller", "enabled", "errors", "state", "detail", "sequence"),
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
        self.enabled, self.errors, self.state, self.detail = True, 0, State.REMOVED, ""
        self.sequence = next(_sequence)

    def with_hook(self, hook: Any) -> Advice:
        """The same advice with another hook, not woven yet."""
        anew = Advice(self.target, self.hook_type, hook, self.order, self.source, self.required, self.on_lost)
        anew.sequence = self.sequence
        return anew

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

    def record_error(self, error: Exception) -> None:
        """An observer raised: count it, and say so the first time."""
        self.errors += 1
        if self.errors == 1:
            logger.warning(
                "%s raised %r; the call went on without it, later errors are only counted",
                self,
                error,
                exc_info=error,
            )


def _check_hook(hook: Any, hook_type: object, target: Target) -> None:
    """Raise :class:`HookError`, with the fix, where ``hook`` can never work as ``hook_type``."""
    if not isinstance(hook_type, HookType):
        choices = ", ".join(kind.name for kind in HookType)
        raise HookError(f"{target}: {hook_type!r} is not a HookType; choose one of {choices}")
    if hook_type is HookType.OBSERVE:
        parts = [getattr(hook, name, None) for name in ("enter", "exit", "bound_to")]
        fault = None
        if is_class(hook):
            fault = "is a class: pass an instance"
        elif not any(map(callable, parts)):
            fault = "has no enter and no exit()"
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


def innermost_first(advices: Iterable[Advice]) -> list[Advice]:
    """The one order of hooks at a join point.

    REPLACE is innermost; then ``order`` ascending from the inside to the outside; equal orders in
    registration order with the later one outside.
    """
    return sorted(
        advices, key=lambda advice: (advice.hook_type is not HookType.REPLACE, advice.order, advice.sequence)
    )


# -- reading an argument -------------------------------------------------------------------------------------

ArgumentReader = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def argument_reader(function: Callable[..., Any], parameter: str) -> ArgumentReader:
    """Reads ``parameter`` of ``function``: its default, or None, where a call leaves it out.

    :raises HookError: ``function`` has no such parameter, or does not say which it has.
    """
    try:
        # As it is called: what it wraps may have other parameters.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError) as error:
        raise HookError(
            f"no parameter {parameter!r} can be read: {function!r} does not say which it has"
        ) from error
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
        except TypeError:  # the call itself will say so
            return None

    if found.kind in (found.VAR_POSITIONAL, found.VAR_KEYWORD):
        return read_variadic
    if found.kind is found.KEYWORD_ONLY:
        return lambda args, kwargs: kwargs.get(parameter, default)
    if found.kind is found.POSITIONAL_ONLY:  # a keyword of this name belongs to **kwargs
        return lambda args, kwargs: args[position] if position < len(args) else default
    return lambda args, kwargs: args[position] if position < len(args) else kwargs.get(parameter, default)


# -- from an original and its hooks to one callable ----------------------------------------------------------


def build_chain(original: Hook, advices: Sequence[Advice], *, awaits: bool) -> Hook:
    """The head of the chain over ``original``; ``advices`` come innermost first, observers left out.

    :param awaits: the target is ``async def``: links return awaitables, AFTER gets the awaited result.
    """
    head = original
    for advice in advices:
        head = _link(advice, head, awaits)
    return head


#: Every live callable of ours that holds an original, by its id. A call in flight goes on
#: with the chain that it began with, also when its hooks are gone and others have come.
_callers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def calls_original(caller: Hook) -> Hook:
    """Mark ``caller``, a bound method or function of ours: rebinding leaves alone what it holds."""
    _callers[id(caller)] = caller
    return caller


def containers_of_callers() -> Iterator[Any]:
    """The containers by which what was marked holds originals."""
    for reference in _callers.valuerefs():
        caller = reference()
        if type(caller) is types.FunctionType:
            yield caller.__dict__
            yield from caller.__closure__ or ()
        else:
            yield caller


def _link(advice: Advice, following: Hook, awaits: bool) -> Hook:
    hook: Hook = advice.hook
    if advice.hook_type is HookType.REPLACE:
        return _awaited(hook) if awaits else hook
    if advice.hook_type is HookType.AROUND:
        link = calls_original(types.MethodType(hook, following))
        return _awaited(link, hook) if awaits else link
    if advice.hook_type is HookType.NATIVE:
        return _native_link(hook, following, awaits)
    if advice.hook_type is HookType.BEFORE:
        return _async_before(advice, following) if awaits else _before(advice, following)
    return _async_after(hook, following) if awaits else _after(hook, following)


def _before(advice: Advice, following: Hook) -> Hook:
    hook: Hook = advice.hook

    def before(*args: Any, **kwargs: Any) -> Any:
        changed = hook(*args, **kwargs)
        if changed is not None:
            args, kwargs = _changed_arguments(changed, advice)
        return following(*args, **kwargs)

    return calls_original(before)


def _after(hook: Hook, following: Hook) -> Hook:
    def after(*args: Any, **kwargs: Any) -> Any:
        result = following(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        if changed is None:
            return result
        return changed.value if isinstance(changed, Result) else changed

    return calls_original(after)


def _native_link(hook: Hook, following: Hook, awaits: bool) -> Hook:
    proceed: Hook
    if isinstance(following, NativeLink):
        # Natives side by side hand the same packed pair on: nothing is unpacked between them.
        proceed = following.run
    else:

        def proceed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return following(*args, **kwargs) if kwargs else following(*args)

        calls_original(proceed)
    link = NativeLink(types.MethodType(hook, proceed))
    return _awaited(link, hook) if awaits else link


class NativeLink:
    """A link of the native contract: ``run(args, kwargs)`` takes the packed pair as it is."""

    __slots__ = ("run",)

    def __init__(self, run: Hook) -> None:
        self.run = run

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.run(args, kwargs)


def _changed_arguments(changed: Any, advice: Advice) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        args, kwargs = changed
    except (TypeError, ValueError):
        args, kwargs = None, None
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise HookError(f"{advice} returned {reprlib.repr(changed)}; return None, or a pair (args, kwargs)")
    return tuple(args), kwargs


# -- async def targets --------------------------------------------------------------------------------


def _awaited(link: Hook, hook: Hook | None = None) -> Callable[..., Awaitable[Any]]:
    """``link`` as a coroutine function: its hook may be sync, and may return a plain value."""
    if inspect.iscoroutinefunction(hook if hook is not None else link):
        return link

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return await _settled(link(*args, **kwargs))

    return awaited


async def _settled(value: Any) -> Any:
    # Once only: a coroutine may well return a task or a future.
    return await value if inspect.isawaitable(value) else value


def _async_before(advice: Advice, following: Hook) -> Hook:
    hook: Hook = advice.hook

    async def before(*args: Any, **kwargs: Any) -> Any:
        changed = await _settled(hook(*args, **kwargs))
        if changed is not None:
            args, kwargs = _changed_arguments(changed, advice)
        return await following(*args, **kwargs)

    return calls_original(before)


def _async_after(hook: Hook, following: Hook) -> Hook:
    async def after(*args: Any, **kwargs: Any) -> Any:
        result = await following(*args, **kwargs)
        changed = await _settled(hook(result, *args, **kwargs))
        if changed is None:
            return result
        return changed.value if isinstance(changed, Result) else changed

    return calls_original(after)


# -- under torch.compile ------------------------------------------------------------------------------------

_chains = types.ModuleType(f"{__name__}.chains")
"""What guarded functions read instead of constants, because torch.compile traces and guards attributes of
modules. It stands as ``__sgl_aspects__`` in the namespaces of the modules whose functions are woven."""

CHAINS_NAME = "__sgl_aspects__"
_readers: dict[int, dict[weakref.ref[types.CodeType], str]] = {}
"""By a namespace's id: the guarded code that looks the name up there, and its chain's name."""


class CompiledChain:
    """The behavioural chain of one function, where torch.compile can trace it."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.name = f"chain_{next(_sequence)}"
        self._namespace = namespace
        self._readers = _readers.setdefault(id(namespace), {})

    def set(self, head: Any, compiling: Any, code: types.CodeType) -> None:
        """Stay while ``code`` lives, which may be longer than the function has it: a call that has just
        begun, or a coroutine that has not, looks the name up later.
        """
        self._readers[weakref.ref(code, self._forget)] = self.name
        chains = vars(_chains)
        chains[self.name], chains["compiling"] = head, compiling
        self._namespace[CHAINS_NAME] = _chains

    def remove(self) -> None:
        """Go, but for calls that have just begun: the compiler itself may keep code."""
        frames = [frame for top in sys._current_frames().values() for frame in _stack(top)]
        begun = {id(frame.f_code) for frame in frames}
        for reader, name in list(self._readers.items()):
            if name == self.name and id(reader()) not in begun:
                self._forget(reader)

    def _forget(self, reader: weakref.ref[types.CodeType]) -> None:
        # In any thread, at any time: a removal is taken back if there is a reader again by now.
        readers, chains = self._readers, vars(_chains)
        readers.pop(reader, None)
        if self.name not in readers.values():
            chain = chains.pop(self.name, None)
            if self.name in readers.values():
                chains.setdefault(self.name, chain)
        if not readers and self._namespace.get(CHAINS_NAME) is _chains:
            self._namespace.pop(CHAINS_NAME, None)
            if readers:
                self._namespace[CHAINS_NAME] = _chains


def _stack(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
