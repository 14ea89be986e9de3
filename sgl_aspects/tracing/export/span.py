"""A finished span in the collector, and its conversion to OpenTelemetry's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from sgl_aspects import __version__
from sgl_aspects.tracing.records import AttributeValue, encodable

SCOPE = InstrumentationScope("sgl_aspects", __version__)
UNSET = Status(StatusCode.UNSET)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


@dataclass(eq=False, slots=True)
class RootContext:
    """The context of a root, as spans below it and links to it refer to it.

    ``trace_state``: a valid header, or "". ``in_spans``, ``in_links``: kept for the OTLP encoder.
    """

    trace_id: int
    span_id: int
    is_remote: bool = False
    trace_state: str = ""
    in_spans: bytes = b""
    in_links: bytes = b""

    def of(self, span_id: int, *, is_remote: bool = False) -> SpanContext:
        """Return OpenTelemetry's context of a span in this trace."""
        state = TraceState.from_header([self.trace_state]) if self.trace_state else None
        return SpanContext(self.trace_id, span_id, is_remote, _SAMPLED, state)


class CollectedSpan(NamedTuple):
    """A span to be exported. ``parent_id`` 0: none.

    Its attributes are ``names`` with ``values`` (None or absent: left out) if ``attributes`` is None.
    ``names`` is the same object in all spans of a type.
    """

    resource: Resource
    root: RootContext
    span_id: int
    parent_id: int
    is_parent_remote: bool
    kind: SpanKind
    name: str
    start_ns: int
    end_ns: int
    names: Mapping[str, type]
    values: Sequence[AttributeValue]
    attributes: Mapping[str, AttributeValue] | None
    links: Sequence[RootContext]
    status: Status

    def with_attributes(self, more: Mapping[str, AttributeValue]) -> CollectedSpan:
        """Return the same span with these attributes, too, within the limit of its own."""
        known: Any = self._known()
        if not isinstance(known, BoundedAttributes):
            return self._replace(attributes={**known, **more})
        bounded: Any = BoundedAttributes(known.maxlen, {**known, **more}, max_value_len=known.max_value_len)
        bounded.dropped += known.dropped
        return self._replace(attributes=bounded)

    def _known(self) -> Mapping[str, AttributeValue]:
        return dict(zip(self.names, self.values)) if self.attributes is None else self.attributes

    def readable(self) -> ReadableSpan:
        """Return OpenTelemetry's form of it."""
        known: Any = self._known()
        if not isinstance(known, BoundedAttributes):
            known = {name: encodable(value) for name, value in known.items() if value is not None}
        root = self.root
        links: Sequence[Link] = [Link(each.of(each.span_id, is_remote=each.is_remote)) for each in self.links]
        if isinstance(self.links, BoundedList):
            bounded = BoundedList.from_seq(None, links)
            bounded.dropped = self.links.dropped
            links = bounded
        return ReadableSpan(
            name=self.name,
            context=root.of(self.span_id),
            parent=root.of(self.parent_id, is_remote=self.is_parent_remote) if self.parent_id else None,
            resource=self.resource,
            attributes=known,
            links=links,
            kind=self.kind,
            status=self.status,
            start_time=self.start_ns,
            end_time=self.end_ns,
            instrumentation_scope=SCOPE,
        )
