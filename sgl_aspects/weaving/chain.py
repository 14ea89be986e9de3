"""From an original and its behavioural hooks to one callable: the head of the chain.

Each link is called with the target's own arguments. An AROUND link is `types.MethodType(hook, next)`:
calling it runs `hook(next, *args, **kwargs)` with no Python frame of ours in between.
"""

from __future__ import annotations

import inspect
import reprlib
import types
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from sgl_aspects.errors import HookError
from sgl_aspects.weaving.hooks import Advice, Hook, HookType, Result


def build_chain(original: Hook, advices: Sequence[Advice], *, awaits: bool) -> Hook:
    """The head of the chain over ``original``; ``advices`` come innermost first, observers left out.

    :param awaits: the target is ``async def``: links return awaitables, AFTER gets the awaited result.
    """
    head = original
    for advice in advices:
        head = _link(advice, head, awaits)
    return head


def own_containers(head: Any) -> Iterator[Any]:
    """What of ours holds the original in the chain below ``head``: rebinding must leave it alone."""
    if isinstance(head, types.MethodType):
        yield head
        yield from own_containers(head.__self__)
    elif isinstance(head, NativeLink):
        yield head
        yield from own_containers(head.run)
    elif isinstance(head, types.FunctionType) and head.__module__ == __name__:
        for cell in head.__closure__ or ():
            yield cell
            yield from own_containers(cell.cell_contents)


def _link(advice: Advice, following: Hook, awaits: bool) -> Hook:
    hook: Hook = advice.hook
    if advice.hook_type is HookType.REPLACE:
        return _awaited(hook) if awaits else hook
    if advice.hook_type is HookType.AROUND:
        link: Hook = types.MethodType(hook, following)
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

    return before


def _after(hook: Hook, following: Hook) -> Hook:
    def after(*args: Any, **kwargs: Any) -> Any:
        result = following(*args, **kwargs)
        changed = hook(result, *args, **kwargs)
        if changed is None:
            return result
        return changed.value if isinstance(changed, Result) else changed

    return after


def _native_link(hook: Hook, following: Hook, awaits: bool) -> Hook:
    proceed: Hook
    if isinstance(following, NativeLink):
        # Natives side by side hand the same packed pair on: nothing is unpacked between them.
        proceed = following.run
    else:

        def proceed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return following(*args, **kwargs) if kwargs else following(*args)

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

    return before


def _async_after(hook: Hook, following: Hook) -> Hook:
    async def after(*args: Any, **kwargs: Any) -> Any:
        result = await following(*args, **kwargs)
        changed = await _settled(hook(result, *args, **kwargs))
        if changed is None:
            return result
        return changed.value if isinstance(changed, Result) else changed

    return after
