"""From a record to OpenTelemetry's finished span."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util import BoundedList
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from sgl_aspects import __version__
from sgl_aspects.tracing import schema
from sgl_aspects.tracing.export.variables import SpanLimits
from sgl_aspects.tracing.records import UNFINISHED, SpanEnd
from sgl_aspects.tracing.ring.decoder import encodable
from sgl_aspects.tracing.ring.reader import RingReader as Writer

_NO_LIMITS = SpanLimits()
_UNSET = Status(StatusCode.UNSET)


class _ProcessResource(Resource):
    """Exporters group spans by it: the SDK's own would be made a JSON text for each span."""

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash


def engine_resource() -> Resource:
    """What the SDK says of this run, in valid UTF-8, and without what it says of this process.

    ``OTEL_EXPERIMENTAL_RESOURCE_DETECTORS`` may describe the process that asks: it is the collector, and the
    spans are those of an engine.
    """
    found = Resource.create()
    named = OTELResourceDetector().detect().attributes
    attributes = {
        encodable(key): encodable(value)
        for key, value in {**found.attributes, **named}.items()
        if key in named or not key.startswith("process.") or key.startswith("process.runtime.")
    }
    if "service.name" not in named:
        attributes["service.name"] = "sgl-aspects"
    return Resource(attributes, found.schema_url)


class SpanBuilder:
    """Spans of one run: the resource of each says which process it is from.

    Beyond the ``limits`` attributes and links are let go, the earliest first, and counted in the span.
    """

    def __init__(self, resource: Resource, limits: SpanLimits = _NO_LIMITS) -> None:
        self._resource = resource
        self._limits = None if limits == _NO_LIMITS else limits
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
        attributes: dict[str, Any],
        links: Sequence[Link],
    ) -> ReadableSpan:
        """The span of ``record``; what else it is made of, the joiner has found out."""
        status = _UNSET
        if record.error:
            attributes[schema.ERROR_TYPE] = record.error
            status = Status(StatusCode.ERROR)
        if record.error == UNFINISHED:
            attributes[schema.UNFINISHED_FLAG] = True
            status = Status(StatusCode.ERROR, "the process ended before the span did")
        held: Mapping[str, Any] = attributes
        if self._limits is not None:
            held = BoundedAttributes(self._limits.attributes, attributes, max_value_len=self._limits.length)
            links = BoundedList.from_seq(self._limits.links, links)
        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self._resources.get(writer.name) or self._make_resource(writer),
            attributes=held,
            links=links,
            kind=kind,
            status=status,
            start_time=record.start_ns,
            end_time=max(record.start_ns, record.end_ns),
            instrumentation_scope=self._scope,
        )

    def _make_resource(self, writer: Writer) -> Resource:
        merged = self._resource.merge(Resource({"process.pid": encodable(writer.process_id)}))
        resource = self._resources[writer.name] = _ProcessResource(merged.attributes, merged.schema_url)
        return resource
