"""What every hook is, where it went, and what it did: as data, and as text."""

from __future__ import annotations

from dataclasses import dataclass, field

from sgl_aspects.weaving.core import Weaver
from sgl_aspects.weaving.fabric import Point
from sgl_aspects.weaving.hooks import Advice, HookSource, HookType, State, innermost_first
from sgl_aspects.weaving.joinpoint import JoinPoint
from sgl_aspects.weaving.rebind import Stale
from sgl_aspects.weaving.targets import Target


@dataclass(frozen=True)
class HookReport:
    """One hook.

    :param places: where it is woven, as ``pkg.mod:Class.method``.
    :param calls: how many calls went through those places since it came.
    :param errors: how many exceptions of an observer were contained.
    :param detail: for a hook that is not woven, why.
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


@dataclass(frozen=True)
class Report:
    """Everything that is registered in this process.

    :param stale: holders of an original that could not be given the woven object.
    :param displaced: places where somebody else's patch stands over ours.
    """

    hooks: tuple[HookReport, ...] = ()
    stale: tuple[Stale, ...] = ()
    displaced: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        lines = [
            f"{hook.state.value:8} {hook.calls:>8} calls  {hook.hook_type.value:8} {hook.target}"
            f"  <- {hook.hook}"
            + (f"  [{hook.source}]" if hook.source else "")
            + (f"  ({hook.detail})" if hook.detail else "")
            for hook in self.hooks
        ]
        lines += [f"stale: {stale.target} is still held by {stale.holder}" for stale in self.stale]
        lines += [f"displaced: somebody else's patch stands over {place}" for place in self.displaced]
        return "\n".join(lines) or "no hooks"


def report(weaver: Weaver) -> Report:
    """A snapshot of ``weaver``."""
    points = weaver.points
    return Report(
        hooks=tuple(_hook_report(weaver, advice) for advice in weaver.advices),
        stale=tuple(stale for point in points for stale in weaver.fabric.stale.get(point, ())),
        displaced=tuple(str(point.place) for point in weaver.displaced),
    )


def _hook_report(weaver: Weaver, advice: Advice) -> HookReport:
    points = weaver.fabric.of(advice)
    return HookReport(
        target=str(advice.target),
        hook=advice.name,
        hook_type=advice.hook_type,
        order=advice.order,
        source=advice.source,
        state=advice.state,
        detail=advice.detail,
        places=tuple(str(point.place) for point, _ in points),
        calls=sum(point.calls - before for point, before in points),
        errors=advice.errors,
        required=advice.required,
    )


def explain(weaver: Weaver, target: str) -> str:
    """What happens when ``target`` is called, outermost hook first, and which hooks wait for it."""
    parsed = Target.parse(target)
    points = weaver.points_named(parsed)
    lines = [line for point in points for line in _explain_point(weaver, point)]
    lines += [
        f"{target}: {advice.state.value}: {advice} ({advice.detail})"
        for advice in weaver.advices
        if not weaver.fabric.of(advice) and _is_about(advice.target, parsed)
    ]
    return "\n".join(lines) or f"{target}: no hooks"


def _explain_point(weaver: Weaver, point: Point) -> list[str]:
    kind = "a generated function" if isinstance(point, JoinPoint) else "a class"
    lines = [
        f"{point.place}: {point.calls} calls, {kind if point.installed else 'the original'} stands there"
    ]
    for depth, advice in enumerate(reversed(innermost_first(point.advices))):
        source = f" [{advice.source}]" if advice.source else ""
        state = "" if advice.enabled else " (disabled)"
        lines.append(
            f"{'  ' * (depth + 1)}{advice.hook_type.value} {advice.name} order={advice.order}{source}{state}"
        )
    lines.append(f"{'  ' * (len(point.advices) + 1)}original {point.place}")
    lines += [f"  still held by {stale.holder}" for stale in weaver.fabric.stale.get(point, ())]
    if point.displaced:
        lines.append("  somebody else's patch stands over it")
    return lines


def _is_about(target: Target, asked: Target) -> bool:
    """Whether ``target`` may come to name what ``asked`` names, as far as the texts tell."""
    names = {alternate.text.replace(":", ".") for alternate in asked.alternates}
    return any(alternate.text.replace(":", ".") in names for alternate in target.alternates)
