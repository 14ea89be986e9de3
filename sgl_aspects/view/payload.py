"""A run's spans as one compact JSON object, in columns, for the report page.

Spans are named by their index, by start time. Times are nanoseconds since ``t0_ms`` (milliseconds since the
epoch), so that JavaScript's numbers hold them. Spans of one name with the same attributes share a type.

    {"source", "is_live", "dropped", "damaged", "clocks", "version", "t0_ms",
     "names":    {constant of tracing/schema.py: attribute}, those that the page reads,
     "types":    [[name, [attribute, …]], …],
     "type": [], "start": [], "duration": [], "parent": [], "process": [],     one number for each span;
                                                 the process of several hosts' spans with its host, as text;
                                                 of several with one name, the second is "7 (2)"
     "values":   [[value, …], …],                  one list for each span, in the order of its type
     "links":    {index: [index, …]},              those of spans that have some
     "errors":   [index, …],
     "requests": [index, …], "steps": [index, …], "step": name of these, and of those of ranks that follow,
     "traces":   {index: trace id},                of requests
     "causes":   {index: [[cause, time, [[index, time], …]], …]}}    of the slowest requests, with culprits
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sgl_aspects import __version__
from sgl_aspects.analysis.causes import Causes
from sgl_aspects.analysis.numbers import STEP
from sgl_aspects.analysis.sources import Run
from sgl_aspects.analysis.spans import Span
from sgl_aspects.tracing import schema

# A longer text is cut: recorded prompts would make the page as large as the run.
_LONGEST_TEXT = 2000
_LONGEST_LIST = 100
_LONGEST_TIME = 1 << 63  # OTLP's times are 64-bit numbers
_EXACT = 1 << 53  # the largest exact integer of JavaScript
_NONE = -1
# Requests whose causes are shown, the slowest ones, and the culprits of each cause.
_EXPLAINED, _CULPRITS = 300, 3


def payload_of(run: Run, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return the object that the page shows; all of its values are valid JSON. ``names``: see above."""
    spans = run.spans
    t0_ns = max(0, min((span.start_ns for span in spans), default=0))
    index_of: dict[str, int] = {}
    for index, span in enumerate(spans):
        index_of.setdefault(span.span_id, index)
    types: dict[tuple[str, ...], int] = {}
    columns: dict[str, list[Any]] = {
        name: [] for name in ("type", "start", "duration", "parent", "process", "values")
    }
    links: dict[int, list[int]] = {}
    processes = _processes(spans)
    for index, span in enumerate(spans):
        type_index = types.setdefault((span.name, *span.attributes), len(types))
        parent = index_of.get(span.parent_id, _NONE) if span.parent_id else _NONE
        columns["type"].append(type_index)
        columns["start"].append(_time(span.start_ns - t0_ns))
        columns["duration"].append(_time(span.end_ns - span.start_ns))
        columns["parent"].append(parent if parent != index else _NONE)
        columns["process"].append(processes[span.place])
        columns["values"].append([_value(value) for value in span.attributes.values()])
        if span.links:
            links[index] = [index_of[link] for link in dict.fromkeys(span.links) if link in index_of]
    requests = [index for index, span in enumerate(spans) if span.is_server]
    causes = Causes(spans)
    steps = {id(step) for step in causes.steps()}
    return {
        "source": run.source,
        "is_live": run.is_live,
        "dropped": run.dropped,
        "damaged": run.damaged,
        "clocks": [str(clock) for clock in run.clocks],
        "version": __version__,
        "t0_ms": min(t0_ns, _LONGEST_TIME) / 1e6,
        "names": {name: getattr(schema, name) for name in names},
        "types": [[name, attributes] for name, *attributes in types],
        **columns,
        "links": links,
        "errors": [index for index, span in enumerate(spans) if span.is_error],
        "requests": requests,
        "steps": [index for index, span in enumerate(spans) if id(span) in steps],
        "step": STEP,
        "traces": {index: spans[index].trace_id for index in requests},
        "causes": _causes(causes, spans, requests, index_of),
    }


def _processes(spans: Sequence[Span]) -> dict[tuple[str, int], int | str]:
    """Return a name for each process, by its place."""
    has_hosts, counts = len({span.host for span in spans}) > 1, Counter[int | str]()
    found: dict[tuple[str, int], int | str] = {}
    for span in spans:
        if span.place not in found:
            name = f"{span.process_id} on {span.host}" if has_hosts else span.process_id
            counts[name] += 1
            found[span.place] = name if counts[name] == 1 else f"{name} ({counts[name]})"
    return found


def _causes(
    causes: Causes, spans: Sequence[Span], requests: Sequence[int], index_of: Mapping[str, int]
) -> dict[int, list[tuple[str, int, list[tuple[int, int]]]]]:
    """Return what the slowest requests' time was spent on, and the requests that had most part in it."""
    # The request of an answer is shown.
    shown = {one: index_of[one if each.is_server else each.parent_id] for one, each in causes.by_id.items()}
    found: dict[int, list[tuple[str, int, list[tuple[int, int]]]]] = {}
    for index in sorted(requests, key=lambda index: -spans[index].seconds)[:_EXPLAINED]:
        if not causes.has_steps(spans[index]):
            continue
        explanation = causes.explain(spans[index])
        found[index] = [
            (
                cause.value,
                round(seconds * 1e9),
                [(shown[one], round(own * 1e9)) for one, own in explanation.worst(cause)[:_CULPRITS]],
            )
            for cause, seconds in explanation.ranked()
        ]
    return found


def _time(ns: int) -> int:
    return min(max(ns, 0), _LONGEST_TIME)


def _value(value: Any) -> Any:
    """Return a JSON value: text of bounded length, a finite number, or a list of these."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -_EXACT <= value <= _EXACT else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return [_value(item) for item in value[:_LONGEST_LIST]]
    text = str(value)
    return text if len(text) <= _LONGEST_TEXT else text[:_LONGEST_TEXT] + "…"
