"""``SGL_ASPECTS_RECORDER=sdk``: the same spans through the ``TracerProvider`` of the application.

For who has processors, samplers and exporters of their own in the engine's processes, and accepts what the
SDK costs there. Each process reports for itself: nothing joins them afterwards, so in a process that does not
know a request's trace, the spans of that request begin traces of their own and carry its id.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode

from sgl_aspects import __version__
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.recorder import id_source
from sgl_aspects.tracing.records import AttributeValue, SpanType

# Spans whose parent has not come yet, and requests that never ended, are given up beyond so many.
_KEPT = 4096


class SdkRecorder:
    """A :class:`~sgl_aspects.tracing.recorder.Recorder` over OpenTelemetry's global provider."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.sample = 1 << 32  # the provider's sampler decides
        self.new_id: Callable[[], int] = id_source()
        self._tracer = trace.get_tracer("sgl_aspects", __version__)
        self._lock = threading.RLock()
        self._open: dict[int, Span] = {}
        self._requests: dict[str, Span] = {}
        self._known: dict[int, Span | None] = {}
        self._request_ids: dict[int, str] = {}
        self._waiting: dict[int, list[Callable[[], None]]] = {}

    def request_begin(
        self,
        span_id: int,
        request_id: str,
        start_ns: int,
        context: TraceContext,
        name: str,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        parent = Context()
        if context.parent_id:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if context.sampled else 0)
            state = trace.TraceState.from_header([context.state]) if context.state else None
            caller = SpanContext(context.trace_id, context.parent_id, context.remote, flags, state)
            parent = trace.set_span_in_context(NonRecordingSpan(caller), parent)
        span = self._start(name, parent, start_ns, SpanKind.SERVER, ())
        span.set_attributes(dict(attributes))
        with self._lock:
            self._keep(span_id, span)
            self._open[span_id] = self._requests[request_id] = span

    def request_sent(self, span_id: int) -> None:
        """Nothing: only a collector joins processes."""

    def request_seen(self, key: int, request_id: str, time_ns: int) -> None:
        with self._lock:
            self._keep(key, self._requests.get(request_id))
            self._request_ids[key] = request_id

    def span_begin(self, span_id: int, root_id: int, parent_id: int, type: SpanType, start_ns: int) -> None:
        with self._lock:
            if parent_id and parent_id not in self._known:
                return  # its end will do
            span = self._start(type.name, self._below(parent_id), start_ns, SpanKind.INTERNAL, ())
            self._open[span_id] = span
            self._keep(span_id, span)

    def span(
        self,
        span_id: int,
        root_id: int,
        parent_id: int,
        type: SpanType,
        start_ns: int,
        end_ns: int,
        values: Sequence[AttributeValue] = (),
        error: str = "",
        links: Sequence[int] = (),
    ) -> None:
        def finish() -> None:
            span = self._open.pop(span_id, None)
            if span is None:
                span = self._start(type.name, self._below(parent_id), start_ns, SpanKind.INTERNAL, links)
            else:
                for link in self._linked(links):
                    span.add_link(link.context)
            for name, value in zip(type.attributes, values):
                if value is not None:
                    span.set_attribute(name, value)
            request_id = self._request_ids.get(parent_id)
            if request_id is not None and self._known.get(parent_id) is None:
                span.set_attribute("gen_ai.request.id", request_id)
            if error:
                span.set_attribute("error.type", error)
                span.set_status(Status(StatusCode.ERROR))
            span.end(end_ns)
            self._keep(span_id, span)
            for waiting in self._waiting.pop(span_id, ()):
                waiting()

        with self._lock:
            if parent_id and parent_id not in self._known:
                _bound(self._waiting)
                self._waiting.setdefault(parent_id, []).append(finish)
            else:
                finish()

    def make_current(self, root_id: int) -> None:
        """Nothing: a step's span is begun only once it is known that the step has work."""

    def close(self) -> None:
        """What is open stays so; flushing is the application's, whose provider it is."""
        with self._lock:
            self.level = 0

    def _start(
        self, name: str, context: Context, start_ns: int, kind: SpanKind, links: Sequence[int]
    ) -> Span:
        return self._tracer.start_span(
            name, context, kind, links=list(self._linked(links)), start_time=start_ns
        )

    def _below(self, parent_id: int) -> Context:
        parent = self._known.get(parent_id)
        return trace.set_span_in_context(parent, Context()) if parent is not None else Context()

    def _linked(self, links: Sequence[int]) -> list[Link]:
        found = [self._known.get(link) for link in links]
        return [Link(span.get_span_context()) for span in found if span is not None]

    def _keep(self, span_id: int, span: Span | None) -> None:
        for kept in (self._known, self._requests, self._request_ids, self._open):
            _bound(kept)
        self._known[span_id] = span


def _bound(kept: dict[Any, Any]) -> None:
    while len(kept) >= _KEPT:
        del kept[next(iter(kept))]
