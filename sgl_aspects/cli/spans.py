"""Spans read back from an OTLP-JSON file: what is shown is what was traced."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_aspects.errors import ConfigError

_SERVER = 2  # SPAN_KIND_SERVER


@dataclass(frozen=True)
class Span:
    """One span; times in nanoseconds since the epoch, ids in hexadecimal."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    is_server: bool
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    #: Ids of the spans that it is linked to.
    links: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    def number(self, attribute: str) -> float:
        """The attribute as a number; 0 where it is absent."""
        value = self.attributes.get(attribute, 0)
        return float(value) if isinstance(value, (int, float)) else 0.0


def read_spans(path: Path) -> list[Span]:
    """Every span of the file, by start time. Raises ConfigError where the file is not OTLP-JSON lines."""
    spans: list[Span] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                spans.extend(_spans_of(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{path}:{number} is no line of OTLP-JSON: {error!r}") from error
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


def children_of(spans: Iterable[Span], parent: Span) -> list[Span]:
    """The spans directly below ``parent``, in the order of ``spans``."""
    return [span for span in spans if span.parent_id == parent.span_id and span.trace_id == parent.trace_id]


def _spans_of(data: dict[str, Any]) -> Iterator[Span]:
    for resource_spans in data.get("resourceSpans", ()):
        for scope_spans in resource_spans.get("scopeSpans", ()):
            for span in scope_spans.get("spans", ()):
                yield Span(
                    name=span["name"],
                    trace_id=span["traceId"],
                    span_id=span["spanId"],
                    parent_id=span.get("parentSpanId", ""),
                    is_server=span.get("kind") == _SERVER,
                    start_ns=int(span["startTimeUnixNano"]),
                    end_ns=int(span["endTimeUnixNano"]),
                    attributes={item["key"]: _value_of(item["value"]) for item in span.get("attributes", ())},
                    links=tuple(link["spanId"] for link in span.get("links", ())),
                )


def _value_of(value: dict[str, Any]) -> Any:
    """OTLP's typed value as Python's; 64-bit integers are text in JSON."""
    kind, content = next(iter(value.items()))
    if kind == "intValue":
        return int(content)
    if kind == "arrayValue":
        return [_value_of(item) for item in content.get("values", ())]
    return content
