"""Builds exportable spans from records."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Container, Mapping, Sequence
from typing import Any

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import SpanKind, Status, StatusCode

from sgl_aspects.tracing import schema
from sgl_aspects.tracing.collect.reader import RingReader as Writer
from sgl_aspects.tracing.export.span import UNSET, RootContext
from sgl_aspects.tracing.records import UNFINISHED, SpanEnd, encodable
from sgl_aspects.tracing.schema import DISAGGREGATION_MODE, NODE_RANK, RANK, SERVICE_NAME, TRANSFER_BACKEND
from sgl_aspects.tracing.variables import SpanLimits

_HOST_NAME = "host.name"
#: Attributes that all processes of a run have in common.
_OF_ALL = (SERVICE_NAME, DISAGGREGATION_MODE, TRANSFER_BACKEND, NODE_RANK)
_NO_LIMITS = SpanLimits()
_NO_RANK: dict[str, Any] = {}
_ERROR = Status(StatusCode.ERROR)
_UNFINISHED = Status(StatusCode.ERROR, "the process ended before the span did")


class RunResource(Resource):
    """The resource of a run: extended by process descriptions while exporters already hold it.

    Values set by the run's starter stay, above all the service name.
    """

    def __init__(self, attributes: Mapping[str, Any], schema_url: str, named: Container[str]) -> None:
        super().__init__(attributes, schema_url)
        self._named = named

    def learn(self, attributes: Mapping[str, Any]) -> None:
        """Add attributes that one process reports and that hold for all processes of the run."""
        found = {name: attributes[name] for name in _OF_ALL if name in attributes}
        self._attributes = BoundedAttributes(attributes=self.with_own(found))

    def with_own(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Return its attributes merged with those of a process."""
        own = {name: value for name, value in attributes.items() if name not in self._named}
        return {**self.attributes, **own}


def engine_resource(folder: str) -> RunResource:
    """Return the SDK's resource for this run, in valid UTF-8, without attributes of the collector's process.

    The run in ``folder`` is one instance of the service, also where its collector was started again.

    ``OTEL_EXPERIMENTAL_RESOURCE_DETECTORS`` may describe the current process: that is the collector, but the
    spans are those of an engine.
    """
    found = Resource.create()
    named = OTELResourceDetector().detect().attributes
    attributes = {
        encodable(key): encodable(value)
        for key, value in {**found.attributes, **named}.items()
        if key in named or not key.startswith("process.") or key.startswith("process.runtime.")
    }
    if SERVICE_NAME not in named:
        attributes[SERVICE_NAME] = "sgl-aspects"
    host = attributes.setdefault(_HOST_NAME, encodable(socket.gethostname()))
    if schema.SERVICE_INSTANCE not in named:
        place = encodable(f"{host}{os.path.abspath(folder)}")
        attributes[schema.SERVICE_INSTANCE] = str(uuid.uuid5(uuid.NAMESPACE_URL, place))
    return RunResource(attributes, found.schema_url, frozenset(named))


def _is_callers_mistake(status_code: Any) -> bool:
    """Return whether the status is not an error of the server's span, by the HTTP conventions."""
    return isinstance(status_code, int) and 400 <= status_code < 500


class SpanBuilder:
    """Builds the spans of one run: the resource of each names its process.

    Attributes and links beyond the ``limits`` are dropped, the earliest first, and counted in the span.
    """

    def __init__(self, resource: Resource, limits: SpanLimits = _NO_LIMITS) -> None:
        self._resource = resource
        self._limits = None if limits == _NO_LIMITS else limits
        #: By the writer's name.
        self.resources: dict[str, Resource] = {}
        #: Whether a span gets attributes that its record does not have.
        self.adds_attributes = self._limits is not None
        self._described: dict[str, Mapping[str, Any]] = {}
        self._ranks: dict[str, dict[str, Any]] = {}

    def complete(
        self,
        writer: Writer,
        record: SpanEnd,
        kind: SpanKind,
        attributes: dict[str, Any],
        links: Sequence[RootContext],
    ) -> tuple[Mapping[str, Any], Sequence[RootContext], Status]:
        """Return all attributes of a span, its links within the limits, and its status.

        ``attributes``: those that its record does not have, to which the others are added.
        """
        error, named = record.error, zip(record.type.attributes, record.values)
        attributes |= {key: value for key, value in named if value is not None}
        attributes |= self._ranks.get(writer.name, _NO_RANK)
        status = UNSET
        if error == UNFINISHED and writer.was_detached:
            attributes[schema.DETACHED_FLAG] = True
        elif error == UNFINISHED:
            attributes |= {schema.ERROR_TYPE: UNFINISHED, schema.UNFINISHED_FLAG: True}
            status = _UNFINISHED
        elif error:
            attributes[schema.ERROR_TYPE] = error
            if not (kind is SpanKind.SERVER and _is_callers_mistake(attributes.get(schema.STATUS_CODE))):
                status = _ERROR
        if self._limits is None:
            return attributes, links, status
        found = {key: encodable(value) for key, value in attributes.items()}
        held = BoundedAttributes(self._limits.attributes, found, max_value_len=self._limits.length)
        return held, BoundedList.from_seq(self._limits.links, links), status

    def is_follower(self, writer: Writer) -> bool:
        """Return whether it is a rank that runs another one's batches."""
        return schema.FOLLOWER in self._described.get(writer.name, ())

    def describe(self, writer: Writer, attributes: Mapping[str, Any]) -> None:
        """Add the process's own attributes to all of its spans from here on."""
        attributes = {key: encodable(value) for key, value in attributes.items()}
        self._described[writer.name] = attributes
        if isinstance(self._resource, RunResource):
            self._resource.learn(attributes)
        self.resources.clear()
        # Each span of an engine with several ranks names its rank: backends compare spans by it.
        known = self._described.values()
        if len({each.get(RANK) for each in known} - {None}) > 1 or any(NODE_RANK in each for each in known):
            self._ranks = {
                name: {key: each[key] for key in (RANK, NODE_RANK) if key in each}
                for name, each in self._described.items()
            }
            self.adds_attributes = True

    def about_the_run(self) -> dict[str, str]:
        """Return the run's service, host and role; also called by another thread."""
        names = {"service": schema.SERVICE_NAME, "host": _HOST_NAME, "role": schema.DISAGGREGATION_MODE}
        known: dict[str, Any] = {**self._resource.attributes}
        for described in list(self._described.values()):
            known |= described
        return {name: str(known[attribute]) for name, attribute in names.items() if attribute in known}

    def make_resource(self, writer: Writer) -> Resource:
        """Return the resource of the writer's process, from now on in ``resources``."""
        process = {"process.pid": encodable(writer.process_id), **self._described.get(writer.name, {})}
        base = self._resource
        merged = base.with_own(process) if isinstance(base, RunResource) else {**base.attributes, **process}
        resource = self.resources[writer.name] = Resource(merged, base.schema_url)
        return resource
