"""What a device ran within a forward pass, for which module of the model, and why it was idle.

From the events of PyTorch's profiler, in which calls of modules are ranges while a profile is taken.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sgl_aspects import compat
from sgl_aspects.compat import ProfilerEvent

#: Begins the name of a range. No operator's does.
RANGE = "sgl_aspects.module "
_LONGEST_NAME = 64
_COPIES = "Memcpy"
_REPLAYED, _OUTSIDE = "replayed graph", "no module"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Kernel:
    """A kernel, in nanoseconds; the idle times before it, when the device ran none, by reason.

    ``graph``: "replayed" for one of a graph. ``count`` above 1: the sum of several. ``layer``: the innermost
    module that was called when it was launched; "replayed graph" where no Python ran then, "" for none.
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
    layer: str = ""


class _Work(NamedTuple):
    """An event of the device, and when the host launched it."""

    event: ProfilerEvent
    launched_ns: int
    operator: str
    layer: str
    graph: str | None = None


def kernels_of(
    events: Iterable[ProfilerEvent],
    passes: Sequence[tuple[int, int]],
    most: int,
    *,
    is_host: bool = False,
    name_of: Callable[[str, str], str] = lambda inner, outermost: inner,
) -> list[list[Kernel]]:
    """Return the kernels of each forward pass, by start, at most ``most`` of each.

    ``passes``: their begin and end, in the events' time, in this order. A kernel belongs to the pass that
    launched it (one replay of a graph launches many), otherwise to the one during which it ran. The idle time
    before it counts from the end of any kernel, or from the begin of its pass: the times of a pass, in which
    kernels may overlap, add up to what lies between its begin and its last end. ``is_host``: the host is the
    device, and its operators are the kernels. ``name_of``: see ``ModuleRanges.names``.
    """
    begins = [begin for begin, _ in passes]
    found: list[list[Kernel]] = [[] for _ in passes]
    reached = 0  # the end of the latest kernel, of any pass or none
    copies: list[tuple[int, int]] = []  # begin and end of those since then
    ordered = sorted(events, key=lambda event: (event.start_ns, -event.duration_ns))
    layers = _layers_of(ordered, name_of)
    for work in _outermost(ordered, layers) if is_host else _work_of(ordered, layers):
        event, launched_ns, operator, layer, graph = work
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
            values = _short(event.name), operator, start, event.duration_ns, event.stream, *times
            kernel = Kernel(*values, graph=graph, layer=layer)
            found[at].append(kernel)
        reached, copies = max(reached, end), []
    return [_bounded(kernels, most) for kernels in found]


def _layers_of(events: Iterable[ProfilerEvent], name_of: Callable[[str, str], str]) -> dict[int, str]:
    """Return the layer by the id of each operator, or range, that ran in a module's call."""
    found: dict[int, str] = {}
    calls: dict[int, list[tuple[int, str, str]]] = {}  # by thread, outermost first: end, range, layer
    for event in events:
        if event.kind != "operator":
            continue
        within = calls.setdefault(event.thread, [])
        while within and within[-1][0] <= event.start_ns:
            within.pop()
        if event.name.startswith(RANGE):
            _, outermost, _ = within[0] if within else (0, event.name, "")
            layer = name_of(event.name, outermost) or within[-1][2]
            within.append((event.start_ns + event.duration_ns, event.name, layer))
        if within:
            found[event.operator_id] = within[-1][2]
    found.pop(0, None)
    return found


def _work_of(events: Sequence[ProfilerEvent], layers: Mapping[int, str]) -> Iterator[_Work]:
    operators = {
        event.operator_id: event.name
        for event in events
        if event.kind == "operator" and not event.name.startswith(RANGE)
    }
    operators.pop(0, None)  # of work that no operator launched
    launches = {event.launch_id: event for event in events if event.kind == "launch"}
    for event in (event for event in events if event.kind == "device"):
        launch = launches.get(event.launch_id)
        graph = "replayed" if launch is not None and "Graph" in launch.name else None
        # A replayed graph has one launch for all of its kernels: its operator tells nothing of them.
        operator = "" if graph else operators.get(event.operator_id, "")
        layer = _REPLAYED if graph else layers.get(event.operator_id, "")
        launched_ns = event.start_ns if launch is None else launch.start_ns
        yield _Work(event, launched_ns, operator or _short(event.name), layer, graph)


def _outermost(events: Iterable[ProfilerEvent], layers: Mapping[int, str]) -> Iterator[_Work]:
    """Yield the operators that no other one called; names without a namespace are ranges around them."""
    ends: dict[int, int] = {}  # by thread
    for event in events:
        if event.kind == "operator" and "::" in event.name and event.start_ns >= ends.get(event.thread, 0):
            ends[event.thread] = event.start_ns + event.duration_ns
            yield _Work(event, event.start_ns, event.name, layers.get(event.operator_id, ""))


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
        layer="others",
        stream=-1,
        count=len(rest),
        duration_ns=sum(kernel.duration_ns for kernel in rest),
        idle_host_ns=sum(kernel.idle_host_ns for kernel in rest),
        idle_transfer_ns=sum(kernel.idle_transfer_ns for kernel in rest),
        idle_launch_ns=sum(kernel.idle_launch_ns for kernel in rest),
    )
    return [*sorted(kept, key=lambda kernel: kernel.start_ns), summed]


def summary_of(kernels: Iterable[Kernel], longest: int = 8) -> Mapping[str, Any]:
    """Return the time by operator and by layer, longest first, and the idle time by reason, in seconds.

    Layers are summed up over their numbers, as ``layers.*.mlp``.
    """
    operators: dict[str, int] = {}
    layers: dict[str, int] = {}
    idle = {"host late": 0, "transfer": 0, "launch": 0}
    count = 0
    for kernel in kernels:
        layer = _NUMBER.sub("*", kernel.layer) or _OUTSIDE
        for times, name in ((operators, kernel.operator), (layers, layer)):
            times[name] = times.get(name, 0) + kernel.duration_ns
        for reason, ns in zip(idle, (kernel.idle_host_ns, kernel.idle_transfer_ns, kernel.idle_launch_ns)):
            idle[reason] += ns
        count += kernel.count
    return {
        "kernels": count,
        "operators": _longest(operators, longest),
        "layers": _longest(layers, longest) if layers.keys() - {_OUTSIDE} else {},
        "idle": {reason: ns / 1e9 for reason, ns in idle.items()},
    }


def _longest(times: Mapping[str, int], most: int) -> dict[str, float]:
    """Return the first names in seconds, and the sum of the rest as "others"."""
    ranked = sorted(times.items(), key=lambda each: -each[1])
    found = {name: ns / 1e9 for name, ns in ranked[:most]}
    if rest := sum(ns for _, ns in ranked[most:]):
        found["others"] = found.get("others", 0.0) + rest / 1e9
    return found


class ModuleRanges:
    """The modules that are called in a profile, each with the name of its ranges.

    It keeps them, so that no two have the same identity.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, str] = {}
        self._modules: dict[str, Any] = {}
        self._numbers = itertools.count()
        self._undo: Callable[[], None] | None = None

    def start(self) -> None:
        """Make a range of each call of a module in this process, in threads that the profiler records."""
        self._undo = compat.name_module_calls(self._range_of)

    def stop(self) -> None:
        """Undo it; no-op if it was not started. In any thread."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def names(self, models: Iterable[Any]) -> Callable[[str, str], str]:
        """Return a function from two ranges, a module's and the outermost around it, to the module's name.

        That is its name in the first of ``models`` that has it, with the model's class in front where there
        are several models; in none of them, its name in the outermost module, with that one's class. "" if
        that has it neither.
        """
        models = [model for model in models if hasattr(model, "named_modules")]
        found: dict[int, str] = {}
        for number, model in enumerate(models):
            label = f"{type(model).__name__}#{number}:" if len(models) > 1 else ""
            for identity, name in _names_in(model, label).items():
                found.setdefault(identity, name)
        below: dict[str, dict[int, str]] = {}

        def name_of(inner: str, outermost: str) -> str:
            module, top = self._modules[inner], self._modules[outermost]
            if id(module) in found:
                return found[id(module)]
            if outermost not in below:
                below[outermost] = _names_in(top, f"{type(top).__name__}.")
            return below[outermost].get(id(module), "")

        return name_of

    def _range_of(self, module: Any) -> str:
        found = self._ranges.get(id(module))
        if found is None:
            found = self._ranges[id(module)] = f"{RANGE}{next(self._numbers)}"
            self._modules[found] = module
        return found


def _names_in(model: Any, label: str) -> dict[int, str]:
    """Return the names of its modules by identity; its own is its class."""
    # torch.compile() wraps a module in another one.
    names = ((id(module), path.replace("_orig_mod.", "")) for path, module in model.named_modules())
    return {identity: label + path for identity, path in names if path} | {id(model): type(model).__name__}
