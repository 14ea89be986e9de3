"""The chain of a target's hooks, under torch.compile, too.

Each link is called with the target's own arguments. An AROUND link is `types.MethodType(hook, next)`: it runs
`hook(next, *args, **kwargs)` without another Python frame.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import opcode
import reprlib
import sys
import types
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from sgl_aspects import compat
from sgl_aspects.errors import HookError
from sgl_aspects.weaving.hooks import Advice, Hook, HookType, Result

logger = logging.getLogger("sgl_aspects")


def build_chain(original: Hook, target: Any, advices: Sequence[Advice], *, awaits: bool) -> Hook:
    """Return the head of the chain over ``original``; ``advices`` innermost first, without observers.

    :param target: what the hooks take ``original_fn`` for: each link has its name and signature.
    :param awaits: the target is ``async def``: links return awaitables, AFTER gets the awaited result.
    """
    head = original
    for advice in advices:
        head = _link(advice, head if head is original else _named(head, target), awaits)
    return head


_OWN = globals()


def _named(link: Hook, target: Any) -> Hook:
    """Give ``link`` the names of ``target``, as `functools.wraps` does; a REPLACE hook keeps its own."""
    if type(link) is types.MethodType and is_of_caller(link):
        link = functools.partial(link.__func__, link.__self__)
    elif not (type(link) is NativeLink or (type(link) is types.FunctionType and link.__globals__ is _OWN)):
        return link
    return calls_original(functools.update_wrapper(link, target, updated=()))


#: Every live link that holds an original, by the ids of the objects through which it refers to it. A call
#: in progress keeps the chain with which it began, even after its hooks were removed.
_callers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def calls_original(caller: Hook) -> Hook:
    """Mark ``caller``, a bound method or function: rebinding does not change its references."""
    _callers[id(caller)] = caller
    if type(caller) is not types.MethodType:  # a method has the attributes of its function, a hook
        closure = getattr(caller, "__closure__", None) or ()
        for container in (caller.__dict__, getattr(caller, "args", caller), *closure):  # a partial has `args`
            _callers[id(container)] = caller
    return caller


def is_of_caller(container: Any) -> bool:
    """Return whether a marked callable holds its original through ``container``."""
    return id(container) in _callers


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
        try:
            changed = hook(*args, **kwargs)
            if changed is not None:
                args, kwargs = _changed_arguments(changed, advice)
            result = following(*args, **kwargs)
            "The frame shows from here on."
            return result
        except BaseException:
            "The frame shows from here on."
            raise

    before.__code__ = hidden(before.__code__)
    return calls_original(before)


def _after(hook: Hook, following: Hook) -> Hook:
    def after(*args: Any, **kwargs: Any) -> Any:
        try:
            result = following(*args, **kwargs)
            changed = hook(result, *args, **kwargs)
            if changed is not None:
                result = changed.value if isinstance(changed, Result) else changed
            "The frame shows from here on."
            return result
        except BaseException:
            "The frame shows from here on."
            raise

    after.__code__ = hidden(after.__code__)
    return calls_original(after)


@functools.cache
def hidden(code: types.CodeType) -> types.CodeType:
    """Return ``code`` with a frame that is hidden until one of its two string statements.

    They compile to its last two NOPs; an earlier NOP is that of `try`.
    """
    starts = [(code.co_code[begin], line) for begin, _, line in code.co_lines() if line]
    return compat.hide_frame(code, *[line for first, line in starts if first == opcode.opmap["NOP"]][-2:])


def _native_link(hook: Hook, following: Hook, awaits: bool) -> Hook:
    proceed: Hook
    if isinstance(following, NativeLink):
        # Adjacent native hooks pass on the same pair, without unpacking it.
        proceed = following.run
    else:

        def proceed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return following(*args, **kwargs) if kwargs else following(*args)

        calls_original(proceed)
    link = NativeLink(types.MethodType(hook, proceed))
    return _awaited(link, hook) if awaits else link


class NativeLink:
    """A link of the native contract: ``run(args, kwargs)`` takes the tuple and the dictionary as they are."""

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
    """Return ``link`` as a coroutine function: its hook may be sync, and may return a plain value."""
    if inspect.iscoroutinefunction(hook if hook is not None else link):
        return link

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return await _settled(link(*args, **kwargs))

    return awaited


async def _settled(value: Any) -> Any:
    # Awaited once only: the result may be a task or a future.
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
"""Guarded functions read its attributes instead of constants, because torch.compile guards module attributes.
It is ``__sgl_aspects__`` in the namespaces of the modules whose functions were woven, and stays there."""

CHAINS_NAME = "__sgl_aspects__"
_numbers = itertools.count(1)


class CompiledChain:
    """The chain of one function, without observers, as an attribute that torch.compile can trace.

    :param reader: an object that lives as long as any code that reads the attribute: calls and coroutines may
        outlive the hooks.
    """

    def __init__(self, namespace: dict[str, Any], reader: Any) -> None:
        self.name = f"chain_{next(_numbers)}"
        namespace[CHAINS_NAME] = _chains
        weakref.finalize(reader, vars(_chains).pop, self.name, None).atexit = False

    def set(self, head: Any) -> None:
        """Publish the chain."""
        setattr(_chains, self.name, head)


class Compiler:
    """torch.compile, once it is loaded.

    :ivar guards: torch.compile is loaded, so woven functions test whether it traces their caller.
    """

    MODULE = "torch._dynamo"
    """Once it is loaded, torch.compile may trace a woven function."""

    def __init__(self) -> None:
        self.guards = False

    def notice(self, points: Iterable[Any]) -> None:
        """Look whether it has been loaded; ``points``: all join points."""
        compiler = sys.modules.get("torch.compiler")
        if self.guards or self.MODULE not in sys.modules or compiler is None:
            return
        try:
            vars(_chains)["compiling"] = compat.compiling_test(compiler)
        except AttributeError:  # it is being loaded: looked at again when it is
            return
        self.guards = True
        for point in points:
            point.refresh(guarded=True)

    def forget(self, advices: Iterable[Advice], points: Iterable[Any]) -> None:
        """Reset torch.compile if its code may contain the old body of one of ``points``.

        It does not guard the methods of a class, and compiles a caller anew only a few times.
        """
        if self.MODULE in sys.modules and any(one.hook_type is not HookType.OBSERVE for one in advices):
            compat.forget_compiled([point.inner for point in points])
