"""The two public APIs of the weaver: decorators with handles, and SGLang's registry."""

from __future__ import annotations

import contextlib
import inspect
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from sgl_aspects.errors import AspectsError, HookError
from sgl_aspects.weaving.hooks import Advice, HookSource, HookType, State, innermost_first
from sgl_aspects.weaving.joinpoints import JoinPoint
from sgl_aspects.weaving.machine import Weaver
from sgl_aspects.weaving.modules import detail_of, why_absent, why_not_importable
from sgl_aspects.weaving.rebinding import Stale
from sgl_aspects.weaving.targets import Target

logger = logging.getLogger("sgl_aspects")

weaver = Weaver()
"""The weaver of this process."""

_ADVICES = "__sgl_aspects_advices__"
_UNUSED = "__sgl_aspects_unused__"
_BOUND = (types.MethodType, types.BuiltinMethodType)
_F = TypeVar("_F", bound=Callable[..., Any] | type)


# -- decorators and handles -----------------------------------------------------------------------------


def _decorator(hook_type: HookType, targets: tuple[str, ...], options: dict[str, Any]) -> Callable[[_F], _F]:
    target = Target.parse(targets)

    def mark(hook: _F) -> _F:
        made = hook() if hook_type is HookType.OBSERVE and isinstance(hook, type) else hook
        advice = Advice(target, hook_type, made, **options)
        try:
            if _ADVICES not in vars(hook):
                setattr(hook, _ADVICES, [])
        except (AttributeError, TypeError):
            raise HookError(
                f"{target}: {hook!r} cannot carry a mark; weave Advice(Target.parse(...), ...) instead"
            ) from None
        vars(hook)[_ADVICES].append(advice)
        return hook

    vars(mark)[_UNUSED] = f"{hook_type.value}({str(target)!r})"
    return mark


def before(*targets: str, order: int = 0, required: bool = False) -> Callable[[_F], _F]:
    """Mark a function as a BEFORE hook on ``targets`` (alternates: the first that exists wins)."""
    return _decorator(HookType.BEFORE, targets, {"order": order, "required": required})


def after(*targets: str, order: int = 0, required: bool = False) -> Callable[[_F], _F]:
    """Mark a function as an AFTER hook."""
    return _decorator(HookType.AFTER, targets, {"order": order, "required": required})


def around(*targets: str, order: int = 0, required: bool = False) -> Callable[[_F], _F]:
    """Mark a function as an AROUND hook."""
    return _decorator(HookType.AROUND, targets, {"order": order, "required": required})


def replace(*targets: str, order: int = 0, required: bool = False) -> Callable[[_F], _F]:
    """Mark a function, or a class, as the replacement of the target."""
    return _decorator(HookType.REPLACE, targets, {"order": order, "required": required})


def native(*targets: str, order: int = 0, required: bool = False) -> Callable[[_F], _F]:
    """Mark ``fn(proceed, args, kwargs)`` as an around hook of the native contract."""
    return _decorator(HookType.NATIVE, targets, {"order": order, "required": required})


def observe(
    *targets: str,
    enter: Callable[..., Any] | None = None,
    exit: Callable[..., Any] | None = None,
    order: int = 0,
    required: bool = False,
) -> Any:
    """An observer on ``targets``: decorates a class or instance with ``enter`` and ``exit``.

    With ``enter=``, ``exit=`` or both given as functions, returns the :class:`Advice`, ready to weave.
    A class is instantiated without arguments when it is decorated.
    """
    if enter is None and exit is None:
        return _decorator(HookType.OBSERVE, targets, {"order": order, "required": required})
    shown = exit if enter is None else enter
    names = {name: getattr(shown, name) for name in ("__module__", "__qualname__") if hasattr(shown, name)}
    pair = types.SimpleNamespace(enter=enter, exit=exit, **names)
    return Advice(Target.parse(targets), HookType.OBSERVE, pair, order, required=required)


class Aspect:
    """A group of hooks that are woven together: methods of a subclass that carry the decorators above."""

    def _advices(self) -> list[Advice]:
        found: list[Advice] = []
        for name in dir(type(self)):
            raw = inspect.getattr_static(type(self), name)
            function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
            # The mark may be outside of @staticmethod or inside.
            marked = getattr(raw, "__dict__", {}).get(_ADVICES) or getattr(function, _ADVICES, [])
            self._warn_of_overridden(name, marked)
            for advice in marked:
                hook = advice.hook if advice.hook_type is HookType.OBSERVE else getattr(self, name)
                found.append(advice.with_hook(hook))
        return sorted(found, key=lambda advice: advice.sequence)

    def _warn_of_overridden(self, name: str, marked: list[Advice]) -> None:
        for base in type(self).__mro__[1:]:
            earlier = getattr(vars(base).get(name), "__dict__", {}).get(_ADVICES)
            if earlier and not marked:
                logger.warning(
                    "%s.%s carries no decorator, so %s is not woven; repeat the decorator on it",
                    *(type(self).__qualname__, name, earlier[0]),
                )
                return


class Handle:
    """Hooks that were woven together; removes, disables and enables them."""

    def __init__(self, advices: tuple[Advice, ...] = ()) -> None:
        self.advices = advices

    def __repr__(self) -> str:
        with weaver.lock:
            return str(Report(tuple(map(_hook_report, self.advices))))

    def remove(self) -> None:
        """Remove the hooks; without other hooks on a target, its original object is restored."""
        weaver.remove(self.advices)

    def disable(self) -> None:
        """Switch the hooks off; costs nothing per call while off."""
        weaver.set_enabled(self.advices, False)

    def enable(self) -> None:
        """Switch the hooks on again, in their earlier place in the order."""
        weaver.set_enabled(self.advices, True)

    @property
    def states(self) -> tuple[State, ...]:
        """The state of each hook."""
        return tuple(advice.state for advice in self.advices)


def weave(*hooks: Any) -> Handle:
    """Attach decorated functions and classes, :class:`Aspect` groups, or :class:`Advice` objects.

    Where a target's module is not loaded, nothing is imported and the hook waits for it.

    :raises HookError: an argument carries no hooks, or a hook cannot work on its target.
    :raises MissingTargetError: a hook marked ``required`` has no target though its module is loaded.
    """
    advices = tuple(advice for hook in hooks for advice in _advices_of(hook))
    for advice in advices:  # an advice can be in one chain only
        if advice.state is not State.REMOVED:
            raise HookError(f"{advice} is woven already; use its handle, or decorate another function")
    weaver.add(advices)
    return Handle(advices)


def _advices_of(hook: Any) -> Iterable[Advice]:
    if isinstance(hook, Advice):
        return [hook]
    if isinstance(hook, type) and issubclass(hook, Aspect):
        hook = hook()
    found: list[Advice] = hook._advices() if isinstance(hook, Aspect) else getattr(hook, _ADVICES, [])
    unused = getattr(hook, _UNUSED, None)
    if unused is not None:
        more = ", or give it enter=, exit= or both" if unused.startswith("observe") else ""
        raise HookError(f"{unused} has decorated nothing: write it as a decorator above the hook{more}")
    if not found:
        raise HookError(
            f"{hook!r} carries no hooks; decorate it with before, after, around, replace, native or observe"
        )
    return found


@contextlib.contextmanager
def woven(*hooks: Any) -> Iterator[Handle]:
    """Weave hooks for the length of a ``with`` block."""
    handle = weave(*hooks)
    try:
        yield handle
    finally:
        handle.remove()


# -- SGLang's names -------------------------------------------------------------------------------------


class HookRegistry:
    """SGLang's registry: the same names and signatures, lazy, complete, and removable."""

    _advices: list[Advice] = []  # noqa: RUF012  one registry a process, as in SGLang

    @classmethod
    def register(
        cls,
        target: str | Iterable[str],
        hook: Any,
        hook_type: HookType = HookType.AFTER,
        *,
        source: HookSource | None = None,
        order: int = 0,
        required: bool = False,
    ) -> None:
        """Register a hook. It takes effect with :meth:`apply_hooks`, or at once on a target that is woven."""
        advice = Advice(Target.parse(target), hook_type, hook, order, source, required)
        with weaver.lock:
            if weaver.points_named(advice.target):
                weaver.add([advice], strict=required)
            cls._advices.append(advice)

    @classmethod
    def adopt(cls, advices: Iterable[Advice]) -> None:
        """Register existing advices. They take effect with :meth:`apply_hooks`."""
        with weaver.lock:
            cls._advices.extend(advices)

    @classmethod
    def disown(cls, advices: Iterable[Advice]) -> None:
        """Remove these advices, by identity."""
        gone = list(advices)
        with weaver.lock:
            weaver.remove(gone)
            cls._advices[:] = [advice for advice in cls._advices if advice not in gone]

    @classmethod
    def apply_hooks(cls) -> None:
        """Weave the registered hooks; idempotent. A hook that fails is logged, and the others are woven.

        :raises HookError, MissingTargetError: of the first ``required`` hook that cannot be woven, after
            all others have been.
        """
        failures: list[AspectsError] = []
        with weaver.lock:
            fresh = [advice for advice in cls._advices if advice.state is State.REMOVED]
            weaver.apply()
            cls._add_all([advice for advice in fresh if not advice.required])
            for advice in fresh:
                if advice.required:
                    try:
                        weaver.add([advice])
                    except AspectsError as failure:
                        failures.append(failure)
        if failures:
            raise failures[0]

    @classmethod
    def _add_all(cls, advices: list[Advice]) -> None:
        """Add them in one rebinding pass; one by one if that raises."""
        try:
            weaver.add(advices, strict=False)
        except Exception as error:
            if len(advices) == 1:
                advices[0].state, advices[0].detail = State.FAILED, repr(error)
                logger.exception("%s failed", advices[0])
            else:
                for advice in advices:
                    cls._add_all([advice])

    @classmethod
    def is_hook_applied(cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER) -> bool:
        """Return whether this hook is woven on ``target``."""
        return any(advice.state is State.WOVEN for advice in cls._found(target, hook, hook_type))

    @classmethod
    def unregister(cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER) -> bool:
        """Remove a hook; False if it is not registered."""
        with weaver.lock:
            found = cls._found(target, hook, hook_type)
            cls.disown(found)
        return bool(found)

    @classmethod
    def reset(cls) -> None:
        """Remove every hook that was registered here."""
        with weaver.lock:
            cls.disown(cls._advices)

    @classmethod
    def _found(cls, target: str, hook: Any, hook_type: HookType) -> list[Advice]:
        names = _dotted(Target.parse(target))
        return [
            advice
            for advice in cls._advices
            if advice.hook_type is hook_type
            and _dotted(advice.target) == names
            # Each access to a bound method creates a new object.
            and (advice.hook is hook or (type(hook) in _BOUND and hook == advice.hook))
        ]


def _dotted(target: Target) -> list[str]:
    """The alternates of ``target`` in SGLang's form, to compare them with those of others."""
    return [alternate.text.replace(":", ".") for alternate in target.alternates]


def plugin_hook(target: str, type: HookType = HookType.AFTER) -> Callable[[_F], _F]:
    """Register the decorated function or class as a hook, as in SGLang."""

    def register(hook: _F) -> _F:
        HookRegistry.register(target, hook, type)
        return hook

    return register


# -- reports -------------------------------------------------------------------------------------------------


class HookReport(NamedTuple):
    """One hook.

    :param places: where it is woven, as ``pkg.mod:Class.method``.
    :param calls: the number of calls through those places since it was added.
    :param errors: the number of an observer's exceptions that were contained.
    :param detail: the reason why a hook is not woven.
    :param is_counted: whether calls are counted: those of a class that replaces another one are not.
    """

    target: str
    hook: str
    hook_type: HookType
    order: int
    source: HookSource | None
    state: State
    detail: str
    places: tuple[str, ...]
    calls: int
    errors: int
    required: bool
    is_counted: bool = True


class Report(NamedTuple):
    """Everything that is registered in this process.

    :param stale: referrers of an original that could not be rebound to the woven object.
    :param displaced: places where another patch covers the woven object.
    """

    hooks: tuple[HookReport, ...] = ()
    stale: tuple[Stale, ...] = ()
    displaced: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{hook.state.value:8} {hook.calls:>8} calls  {hook.hook_type.value:8} {hook.target}"
            f"  <- {hook.hook}"
            + (f"  [{hook.source}]" if hook.source else "")
            + (f"  ({hook.detail})" if hook.detail else "")
            for hook in self.hooks
        ]
        lines += [f"stale: {stale.target} is still held by {stale.holder}" for stale in self.stale]
        lines += [f"displaced: another patch covers {place}" for place in self.displaced]
        return "\n".join(lines) or "no hooks"


def report() -> Report:
    """Return every hook of this process with its state and counts, stale bindings, displaced places."""
    with weaver.lock:
        advices = weaver.advices
        found = Report(
            hooks=tuple(map(_hook_report, advices)),
            stale=tuple(stale for point in weaver.points for stale in point.stale),
            displaced=tuple(str(point.place) for point in weaver.displaced()),
        )
    details = map(detail_of, advices)  # without the lock: it calls finders
    return found._replace(hooks=tuple(hook._replace(detail=why) for hook, why in zip(found.hooks, details)))


def _hook_report(advice: Advice) -> HookReport:
    return HookReport(
        target=str(advice.target),
        hook=advice.name,
        hook_type=advice.hook_type,
        order=advice.order,
        source=advice.source,
        state=advice.state,
        detail=advice.detail,
        places=tuple(str(point.place) for point, _ in advice.points),
        calls=sum(point.calls - before for point, before in advice.points),
        errors=advice.errors,
        required=advice.required,
        is_counted=not advice.is_class_replacement,
    )


def explain(target: str) -> str:
    """Describe a call of ``target``: its hooks, outermost first, and the hooks that wait for it."""
    parsed = Target.parse(target)
    lines = [line for point in weaver.points_named(parsed) for line in _explain_point(point)]
    lines += [
        f"{target}: {advice.state.value}: {advice} ({detail_of(advice)})"
        for advice in weaver.advices
        # Compared as text: such a hook has no join point.
        if not advice.points and not set(_dotted(advice.target)).isdisjoint(_dotted(parsed))
    ]
    fault = why_not_importable(parsed) or why_absent(parsed)
    return "\n".join(lines) or f"{target}: no hooks" + (f" ({fault})" if fault else "")


def _explain_point(point: JoinPoint) -> list[str]:
    standing = point.kind if point.installed else "the original"
    lines = [f"{point.place}: {point.calls} calls, {standing} is installed"]
    for depth, advice in enumerate(reversed(innermost_first(point.advices))):
        source = f" [{advice.source}]" if advice.source else ""
        state = "" if advice.enabled else " (disabled)"
        lines.append(
            f"{'  ' * (depth + 1)}{advice.hook_type.value} {advice.name} order={advice.order}{source}{state}"
        )
    lines.append(f"{'  ' * (len(point.advices) + 1)}original {point.place}")
    lines += [f"  still held by {stale.holder}" for stale in point.stale]
    if point.displaced:
        lines.append("  another patch covers it")
    return lines
