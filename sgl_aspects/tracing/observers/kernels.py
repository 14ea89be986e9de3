"""What a device ran within a forward pass, from the events of PyTorch's profiler, and why it was idle."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sgl_aspects.compat import ProfilerEvent

_LONGEST_NAME = 64
_COPIES = "Memcpy"


@dataclass(frozen=True)
class Kernel:
    """A kernel, in nanoseconds; the idle times before it by reason. ``count`` above 1: the sum of several."""

    name: str
    operator: str
    start_ns: int
    duration_ns: int
    stream: int
    idle_host_ns: int = 0
    idle_transfer_ns: int = 0
    idle_launch_ns: int = 0
    count: int = 1


class _Work(NamedTuple):
    """An event of the device, and when the host launched it."""

    event: ProfilerEvent
    launched_ns: int
    operator: str


def kernels_of(
    events: Iterable[ProfilerEvent], passes: Sequence[tuple[int, int]], most: int, *, is_host: bool = False
) -> list[list[Kernel]]:
    """Return the kernels of each forward pass, by start, at most ``most`` of each.

    ``passes``: their begin and end, in the events' time, in this order. A kernel belongs to the pass that
    launched it (one replay of a graph launches many), otherwise to the one during which it ran. ``is_host``:
    the host is the device, and its operators are the kernels.
    """
    begins = [begin for begin, _ in passes]
    work: list[list[_Work]] = [[] for _ in passes]
    ordered = sorted(events, key=lambda event: (event.start_ns, -event.duration_ns))
    for each in _outermost(ordered) if is_host else _work_of(ordered):
        at = bisect.bisect_right(begins, each.launched_ns) - 1
        if at >= 0 and each.launched_ns < passes[at][1]:
            work[at].append(each)
    return [_bounded(_with_idle(one), most) for one in work]


def _work_of(events: Sequence[ProfilerEvent]) -> Iterator[_Work]:
    operators = {event.operator_id: event.name for event in events if event.kind == "operator"}
    operators.pop(0, None)  # of work that no operator launched
    launches = {event.launch_id: event for event in events if event.kind == "launch"}
    for event in (event for event in events if event.kind == "device"):
        launch = launches.get(event.launch_id)
        operator = operators.get(event.operator_id, "")
        # A replayed graph has one launch for all of its kernels: its operator tells nothing of them.
        if not operator or (launch is not None and "Graph" in launch.name):
            operator = _short(event.name)
        yield _Work(event, event.start_ns if launch is None else launch.start_ns, operator)


def _outermost(events: Iterable[ProfilerEvent]) -> Iterator[_Work]:
    """Yield the operators that no other one called; names without a namespace are ranges around them."""
    ends: dict[int, int] = {}  # by thread
    for event in events:
        if event.kind == "operator" and "::" in event.name and event.start_ns >= ends.get(event.thread, 0):
            ends[event.thread] = event.start_ns + event.duration_ns
            yield _Work(event, event.start_ns, event.name)


def _with_idle(work: Iterable[_Work]) -> Iterator[Kernel]:
    """Yield the kernels with the device's idle time before each: none of its streams ran one."""
    reached, copies = 0, 0  # the end of the latest kernel; copies since then, in nanoseconds
    for event, launched_ns, operator in work:
        start, end = event.start_ns, event.start_ns + event.duration_ns
        if event.name.startswith(_COPIES):
            copies += max(0, end - max(start, reached)) if reached else 0
            continue
        idle = max(0, start - reached) if reached else 0
        transfer = min(copies, idle)
        host = min(max(0, launched_ns - reached), idle - transfer) if reached else 0
        times = host, transfer, idle - transfer - host
        yield Kernel(_short(event.name), operator, start, event.duration_ns, event.stream, *times)
        reached, copies = max(reached, end), 0


def _short(name: str) -> str:
    """Return a kernel's name without its result and the parameters of its template."""
    return name.removeprefix("void ").partition("(")[0].partition("<")[0][:_LONGEST_NAME]


def _bounded(kernels: Iterable[Kernel], most: int) -> list[Kernel]:
    """Return at most ``most``: where there are more, the shortest are summed up in the last."""
    found = list(kernels)
    if len(found) <= most:
        return found
    longest = sorted(found, key=lambda kernel: -kernel.duration_ns)
    kept, rest = longest[: most - 1], longest[most - 1 :]
    summed = replace(
        min(rest, key=lambda kernel: kernel.start_ns),
        name="others",
        operator="others",
        stream=-1,
        count=len(rest),
        duration_ns=sum(kernel.duration_ns for kernel in rest),
        idle_host_ns=sum(kernel.idle_host_ns for kernel in rest),
        idle_transfer_ns=sum(kernel.idle_transfer_ns for kernel in rest),
        idle_launch_ns=sum(kernel.idle_launch_ns for kernel in rest),
    )
    return [*sorted(kept, key=lambda kernel: kernel.start_ns), summed]


def summary_of(kernels: Iterable[Kernel], longest: int = 8) -> Mapping[str, Any]:
    """Return the time by operator, longest first, and the idle time by reason, in seconds."""
    operators: dict[str, int] = {}
    idle = {"host late": 0, "transfer": 0, "launch": 0}
    count = 0
    for kernel in kernels:
        operators[kernel.operator] = operators.get(kernel.operator, 0) + kernel.duration_ns
        for reason, ns in zip(idle, (kernel.idle_host_ns, kernel.idle_transfer_ns, kernel.idle_launch_ns)):
            idle[reason] += ns
        count += kernel.count
    ranked = sorted(operators.items(), key=lambda each: -each[1])
    first = {name: ns / 1e9 for name, ns in ranked[:longest]}
    rest = sum(ns for _, ns in ranked[longest:])
    return {
        "kernels": count,
        "operators": {**first, "others": rest / 1e9} if rest else first,
        "idle": {reason: ns / 1e9 for reason, ns in idle.items()},
    }
