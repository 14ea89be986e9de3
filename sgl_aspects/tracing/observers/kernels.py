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
    """A kernel, in nanoseconds; the idle times before it, when the device ran none, by reason.

    ``graph``: "replayed" for one of a graph. ``count`` above 1: the sum of several.
    """

    name: str
    operator: str
    start_ns: int
    duration_ns: int
    stream: int
    idle_host_ns: int = 0
    idle_transfer_ns: int = 0
    idle_launch_ns: int = 0
    graph: str | None = None
    count: int = 1


class _Work(NamedTuple):
    """An event of the device, and when the host launched it."""

    event: ProfilerEvent
    launched_ns: int
    operator: str
    graph: str | None = None


def kernels_of(
    events: Iterable[ProfilerEvent], passes: Sequence[tuple[int, int]], most: int, *, is_host: bool = False
) -> list[list[Kernel]]:
    """Return the kernels of each forward pass, by start, at most ``most`` of each.

    ``passes``: their begin and end, in the events' time, in this order. A kernel belongs to the pass that
    launched it (one replay of a graph launches many), otherwise to the one during which it ran. The idle time
    before it counts from the end of any kernel, or from the begin of its pass: the times of a pass add up to
    what lies between its begin and its last kernel's end. ``is_host``: the host is the device, and its
    operators are the kernels.
    """
    begins = [begin for begin, _ in passes]
    found: list[list[Kernel]] = [[] for _ in passes]
    reached = 0  # the end of the latest kernel, of any pass or none
    copies: list[tuple[int, int]] = []  # begin and end of those since then
    ordered = sorted(events, key=lambda event: (event.start_ns, -event.duration_ns))
    for event, launched_ns, operator, graph in _outermost(ordered) if is_host else _work_of(ordered):
        start, end = event.start_ns, event.start_ns + event.duration_ns
        if event.name.startswith(_COPIES):
            copies.append((start, end))
            continue
        at = bisect.bisect_right(begins, launched_ns) - 1
        if at >= 0 and launched_ns < passes[at][1]:
            since = max(reached, begins[at])
            idle = max(0, start - since)
            transfer = min(idle, sum(max(0, till - max(begin, since)) for begin, till in copies))
            host = min(max(0, launched_ns - since), idle - transfer)
            times = host, transfer, idle - transfer - host
            name = _short(event.name)
            found[at].append(Kernel(name, operator, start, event.duration_ns, event.stream, *times, graph))
        reached, copies = max(reached, end), []
    return [_bounded(kernels, most) for kernels in found]


def _work_of(events: Sequence[ProfilerEvent]) -> Iterator[_Work]:
    operators = {event.operator_id: event.name for event in events if event.kind == "operator"}
    operators.pop(0, None)  # of work that no operator launched
    launches = {event.launch_id: event for event in events if event.kind == "launch"}
    for event in (event for event in events if event.kind == "device"):
        launch = launches.get(event.launch_id)
        graph = "replayed" if launch is not None and "Graph" in launch.name else None
        # A replayed graph has one launch for all of its kernels: its operator tells nothing of them.
        operator = "" if graph else operators.get(event.operator_id, "")
        launched_ns = event.start_ns if launch is None else launch.start_ns
        yield _Work(event, launched_ns, operator or _short(event.name), graph)


def _outermost(events: Iterable[ProfilerEvent]) -> Iterator[_Work]:
    """Yield the operators that no other one called; names without a namespace are ranges around them."""
    ends: dict[int, int] = {}  # by thread
    for event in events:
        if event.kind == "operator" and "::" in event.name and event.start_ns >= ends.get(event.thread, 0):
            ends[event.thread] = event.start_ns + event.duration_ns
            yield _Work(event, event.start_ns, event.name)


def _short(name: str) -> str:
    """Return a kernel's name without its result and the parameters of its template."""
    return name.removeprefix("void ").partition("(")[0].partition("<")[0][:_LONGEST_NAME]


def _bounded(found: list[Kernel], most: int) -> list[Kernel]:
    """Return at most ``most``: where there are more, the shortest are summed up in the last."""
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
