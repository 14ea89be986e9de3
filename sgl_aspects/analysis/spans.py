"""Spans read back from an OTLP-JSON file or a process's ring."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing import schema

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_LONGEST = 64 << 20  # bytes of a line
_BEYOND = 1e18
_SERVER = 2  # SPAN_KIND_SERVER
_ERROR = 2  # STATUS_CODE_ERROR
_ROLE = schema.DISAGGREGATION_MODE


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
    #: Ids of the linked spans.
    links: tuple[str, ...]
    #: 0 if unknown.
    process_id: int = 0
    is_error: bool = False
    #: The name of its host; "" if unknown.
    host: str = ""
    #: The role of its server in disaggregation: "prefill" or "decode".
    role: str = ""
    #: The run, OpenTelemetry's `service.instance.id`: processes of two containers of a host may have one id.
    instance: str = ""

    @property
    def place(self) -> tuple[str, int]:
        """Its host and run, and the process."""
        return f"{self.host} {self.instance}", self.process_id

    @property
    def pass_of(self) -> tuple[str, tuple[str, int]]:
        """The stage of a pipeline that its process runs, "" if unknown, and its place."""
        return stage_of(self.attributes.get(schema.RANK)), self.place

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    def number(self, attribute: str, default: float = 0.0) -> float:
        """Return the attribute as a number; the default if it is absent, or beyond any measure."""
        value = self.attributes.get(attribute)
        if not isinstance(value, (int, float)) or not abs(value) < _BEYOND:  # NaN is not below it either
            return default
        return float(value)


def stage_of(rank: object) -> str:
    """Return the stage of a pipeline, such as pp1, that a rank is in; "" if unknown."""
    return "".join(re.findall(r"\bpp\d+", str(rank)))


def whole_of(passes: Mapping[tuple[str, Any], float]) -> float:
    """Return the time of a step's passes, by stage and process.

    A pipeline's stages add up; of a stage's processes, which work at once, the slowest counts.
    """
    slowest: dict[str, float] = {}
    for (stage, _), time in passes.items():
        slowest[stage] = max(slowest.get(stage, 0), time)
    return sum(slowest.values())


def read_spans(path: Path) -> list[Span]:
    """Read each span of the file once, by start time. Raises ConfigError if the file is not OTLP-JSON lines.

    An incomplete last line is left out: the file's writer is at work, or was killed.
    """
    spans: dict[tuple[str, str], Span] = {}  # a collector that is started again repeats the latest
    with path.open("rb") as lines:
        for number, line in enumerate(iter(partial(lines.readline, _LONGEST), b""), 1):
            if not line.strip():
                continue
            try:
                spans.update(((span.trace_id, span.span_id), span) for span in _spans_of(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                if spans and not line.endswith(b"\n"):
                    break
                raise ConfigError(f"{path}:{number} is not a line of OTLP-JSON: {error!r}") from error
    return sorted(spans.values(), key=lambda span: (span.start_ns, -span.end_ns))


def span_of(readable: ReadableSpan) -> Span:
    """Convert a span of OpenTelemetry's SDK to the form that is read back from a file."""
    from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

    context = readable.get_span_context()
    assert context is not None
    start_ns = readable.start_time or 0
    return Span(
        name=readable.name,
        trace_id=format_trace_id(context.trace_id),
        span_id=format_span_id(context.span_id),
        parent_id="" if readable.parent is None else format_span_id(readable.parent.span_id),
        is_server=readable.kind is SpanKind.SERVER,
        start_ns=start_ns,
        end_ns=readable.end_time or start_ns,
        attributes=dict(readable.attributes or {}),
        links=tuple(format_span_id(link.context.span_id) for link in readable.links),
        process_id=_process_id(readable.resource.attributes.get("process.pid", 0)),
        is_error=readable.status.status_code is StatusCode.ERROR,
        host=str(readable.resource.attributes.get("host.name", "")),
        role=str(readable.resource.attributes.get(_ROLE, "")),
        instance=str(readable.resource.attributes.get(schema.SERVICE_INSTANCE, "")),
    )


def readable_of(span: Span) -> ReadableSpan:
    """Convert back, without links, for exporters that take the SDK's spans."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind

    trace_id = int(span.trace_id, 16)
    named: dict[str, int | str] = {"process.pid": span.process_id, "host.name": span.host}
    named[schema.SERVICE_INSTANCE] = span.instance
    parent = SpanContext(trace_id, int(span.parent_id, 16), False) if span.parent_id else None
    return ReadableSpan(
        name=span.name,
        context=SpanContext(trace_id, int(span.span_id, 16), False),
        parent=parent,
        resource=Resource(named),
        attributes=span.attributes,
        kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
        start_time=span.start_ns,
        end_time=span.end_ns,
    )


def children_of(spans: Iterable[Span], parent: Span) -> list[Span]:
    """Return the spans directly below ``parent``, in the order of ``spans``."""
    return [span for span in spans if span.parent_id == parent.span_id and span.trace_id == parent.trace_id]


def _id(text: str) -> str:
    """Return the id; raises ValueError if it is not a hexadecimal number."""
    int(text, 16)
    return text


def _spans_of(data: dict[str, Any]) -> Iterator[Span]:
    for resource_spans in data.get("resourceSpans", ()):
        resource = _attributes_of(resource_spans.get("resource", {}))
        for scope_spans in resource_spans.get("scopeSpans", ()):
            for span in scope_spans.get("spans", ()):
                yield Span(
                    name=str(span["name"]),
                    trace_id=_id(span["traceId"]),
                    span_id=_id(span["spanId"]),
                    parent_id=_id(span["parentSpanId"]) if span.get("parentSpanId") else "",
                    is_server=span.get("kind") in (_SERVER, "SPAN_KIND_SERVER"),
                    start_ns=_integer(span["startTimeUnixNano"]),
                    end_ns=_integer(span["endTimeUnixNano"]),
                    attributes=_attributes_of(span),
                    links=tuple(str(link["spanId"]) for link in span.get("links", ())),
                    process_id=_process_id(resource.get("process.pid", 0)),
                    is_error=span.get("status", {}).get("code") in (_ERROR, "STATUS_CODE_ERROR"),
                    host=str(resource.get("host.name", "")),
                    role=str(resource.get(_ROLE, "")),
                    instance=str(resource.get(schema.SERVICE_INSTANCE, "")),
                )


def _integer(content: Any) -> int:
    """Return OTLP's 64-bit integer; raises ValueError for a larger one, which no figure could be made of."""
    number = int(content)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError(f"an integer of {number.bit_length()} bits")
    return number


def _attributes_of(message: dict[str, Any]) -> dict[str, Any]:
    return {str(item["key"]): _value_of(item.get("value")) for item in message.get("attributes", ())}


def _process_id(value: Any) -> int:
    return value if type(value) is int else 0  # not a truth value


def _value_of(value: dict[str, Any] | None) -> Any:
    """Return OTLP's typed value as Python's; 64-bit integers are text in JSON."""
    if not value:
        return None  # an empty value
    kind, content = next(iter(value.items()))
    if kind == "intValue":
        return _integer(content)
    if kind == "doubleValue":
        return float(content)  # "NaN" and the like
    if kind == "arrayValue":
        return [_value_of(item) for item in content.get("values", ())]
    return content
