"""From a record to OpenTelemetry's finished span, in which every exporter finds what it can encode."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from sgl_aspects import __version__
from sgl_aspects.tracing.records import AttributeValue, SpanEnd
from sgl_aspects.tracing.ring.reader import RingReader as Writer

#: The error of a span whose process ended first.
UNFINISHED = "unfinished"
_UNSET = Status(StatusCode.UNSET)


class _ProcessResource(Resource):
    """Exporters group spans by it: the SDK's own would be made a JSON text for each span."""

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class SpanBuilder:
    """Spans of one run: the resource of each says which process it is from."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._resources: dict[str, Resource] = {}
        self._scope = InstrumentationScope("sgl_aspects", __version__)

    def build(
        self,
        writer: Writer,
        record: SpanEnd,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        name: str,
        attributes: Mapping[str, AttributeValue],
        links: Sequence[Link],
    ) -> ReadableSpan:
        """The span of ``record``; what else it is made of, the joiner has found out."""
        encodable = {_text(key): _encodable(value) for key, value in attributes.items() if value is not None}
        status = _UNSET
        if record.error:
            encodable["error.type"] = _text(record.error)
            status = Status(StatusCode.ERROR)
        if record.error == UNFINISHED:
            encodable["sgl_aspects.unfinished"] = True
            status = Status(StatusCode.ERROR, "the process ended before the span did")
        return ReadableSpan(
            name=_text(name),
            context=context,
            parent=parent,
            resource=self._resource_of(writer),
            attributes=encodable,
            links=links,
            kind=kind,
            status=status,
            start_time=record.start_ns,
            end_time=max(record.start_ns, record.end_ns),
            instrumentation_scope=self._scope,
        )

    def _resource_of(self, writer: Writer) -> Resource:
        resource = self._resources.get(writer.name)
        if resource is None:
            merged = self._resource.merge(Resource({"process.pid": _encodable(writer.process_id)}))
            resource = self._resources[writer.name] = _ProcessResource(merged.attributes, merged.schema_url)
        return resource


def _text(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _encodable(value: Any) -> Any:
    """Valid UTF-8, numbers that fit 64 bits, lists of these: one bad value would cost its whole batch."""
    kind = type(value)
    if kind is str:
        return _text(value)
    if kind is float or kind is bool or (kind is int and -(1 << 63) <= value < 1 << 63):
        return value
    if kind is list:
        return [_encodable(item if not isinstance(item, list) else str(item)) for item in value]
    return _text(str(value))
