"""``SGL_ASPECTS_RECORDER=sdk``: the same spans through the ``TracerProvider`` of the application.

For applications with processors, samplers and exporters of their own in the engine's processes, at the cost
of the SDK. Each process reports for itself: spans are not joined, so in a process without a request's trace,
the spans of that request begin traces of their own and carry its id. The metrics go to the application's
``MeterProvider``, likewise process by process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode

from sgl_aspects import __version__
from sgl_aspects.run import clock
from sgl_aspects.tracing import schema
from sgl_aspects.tracing.context import Opened, TraceContext, enter
from sgl_aspects.tracing.export.metrics import STEP, EngineMetrics
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.open_steps import OpenSteps
from sgl_aspects.tracing.record.recorder import SpanWriter, id_source, span_writer
from sgl_aspects.tracing.record.steps import spans_of
from sgl_aspects.tracing.records import Event, RequestBegin, RequestSeen, SpanBegin, SpanEnd, SpanType

# Cap on spans whose parent has not come, and on requests that never ended.
_KEPT = 4096


class SdkRecorder:
    """A :class:`~sgl_aspects.tracing.record.recorder.Recorder` over OpenTelemetry's global provider."""

    def __init__(self, level: int) -> None:
        self.level = level
        self.sample = 1 << 32  # the provider's sampler decides
        self.new_id: Callable[[], int] = id_source()
        self._clock_offset = clock.unix_offset()
        self._tracer = trace.get_tracer("sgl_aspects", __version__)
        self._metrics = EngineMetrics(metrics.get_meter("sgl_aspects", __version__))
        self._begun: dict[int, RequestBegin] = {}
        self._lock = threading.RLock()
        self._open: dict[int, Span] = {}
        self._requests: dict[str, Span] = {}
        self._known: dict[int, Span | None] = {}
        self._request_ids: dict[int, str] = {}
        self._waiting: dict[int, list[SpanEnd]] = {}  # by the parent that they wait for
        self.steps = OpenSteps.in_memory()
        self.steps.words[layout.WORD_LEVEL] = level
        self.steps.words[layout.WORD_SAMPLE] = layout.SAMPLE_ALL
        self._texts: list[str] = [""]
        self._groups: dict[int, Sequence[int]] = {}

    def open(self) -> bool:
        return True

    def open_span(self, type: SpanType, span_id: int, root_id: int, parent_id: int, start_ns: int) -> Span:
        with self._lock:
            return self._begin(SpanBegin(type, span_id, root_id, parent_id, start_ns))

    def text(self, text: str) -> int:
        with self._lock:
            if text not in self._texts:
                self._texts.append(text)
            return self._texts.index(text)

    def write_group(self, key: int, links: Sequence[int]) -> bool:
        with self._lock:
            _bound(self._groups)
            self._groups[key] = [*links]
        return True

    def end_step(self, steps: OpenSteps, block: int) -> None:
        words = steps.words[block : block + layout.STEP_WORDS].tolist()
        steps.words[block] = 0
        links = self._groups.get(words[layout.STEP_GROUP], ())
        for span in spans_of(words, self._texts.__getitem__, links):
            self._take(span)

    def write(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, RequestBegin):
                self._begin_request(event)
            elif isinstance(event, RequestSeen):
                self._keep(event.key, self._requests.get(event.request_id))
                self._request_ids[event.key] = event.request_id

    def announce(self, type: SpanType, span_id: int, root_id: int, parent_id: int, start_ns: int) -> None:
        with self._lock:
            if not parent_id or parent_id in self._known:  # Otherwise its end is used.
                self._begin(SpanBegin(type, span_id, root_id, parent_id, start_ns))

    def spans(self, type: SpanType) -> SpanWriter:
        return span_writer(type, self._take)

    def enter(
        self,
        type: SpanType,
        span_id: int,
        root_id: int,
        parent_id: int,
        start_ns: int,
        trace: TraceContext | None = None,
    ) -> Opened:
        with self._lock:
            span = self._begin(SpanBegin(type, span_id, root_id, parent_id, start_ns))
        return enter(root_id, span_id, trace, span)

    def close(self) -> None:
        """Leave open spans open; flushing is up to the application, whose provider it is."""
        with self._lock:
            self.level = self.steps.words[layout.WORD_LEVEL] = 0

    def _begin(self, record: SpanBegin) -> Span:
        span = self._open.get(record.span_id)
        if span is None:
            span = self._open[record.span_id] = self._start(record)
            self._keep(record.span_id, span)
        return span

    def _begin_request(self, event: RequestBegin) -> None:
        parent = Context()
        if event.parent_id:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if event.sampled else 0)
            state = trace.TraceState.from_header([event.trace_state]) if event.trace_state else None
            caller = SpanContext(event.trace_id, event.parent_id, event.remote, flags, state)
            parent = trace.set_span_in_context(NonRecordingSpan(caller), parent)
        values = dict(event.attributes)
        # At creation for the provider's sampler; and again, because the span gets only what the sampler
        # returns.
        span = self._tracer.start_span(
            event.name, parent, SpanKind.SERVER, values, start_time=event.start_ns + self._clock_offset
        )
        span.set_attributes(values)
        self._keep(event.span_id, span)
        self._open[event.span_id] = self._requests[event.request_id] = span
        _bound(self._begun)
        self._begun[event.span_id] = event

    def _take(self, span: SpanEnd) -> None:
        with self._lock:
            self._measure(span)
            if not span.span_id:
                return  # metrics only
            if span.parent_id and span.parent_id not in self._known:
                _bound(self._waiting)
                self._waiting.setdefault(span.parent_id, []).append(span)
            else:
                self._finish(span)

    def _measure(self, span: SpanEnd) -> None:
        if span.type.name == STEP:
            self._metrics.step_ended("", os.getpid(), span)
        begin = self._begun.pop(span.span_id, None)
        if begin is not None:
            self._metrics.request_ended(begin, span, 0)

    def _start(self, span: SpanBegin | SpanEnd) -> Span:
        parent = self._known.get(span.parent_id)
        context = trace.set_span_in_context(parent, Context()) if parent is not None else Context()
        return self._tracer.start_span(
            span.type.name, context, SpanKind.INTERNAL, start_time=span.start_ns + self._clock_offset
        )

    def _finish(self, record: SpanEnd) -> None:
        span = self._open.pop(record.span_id, None) or self._start(record)
        for link in record.links:
            linked = self._known.get(link)
            if linked is not None:
                span.add_link(linked.get_span_context())
        for name, value in zip(record.type.attributes, record.values):
            if value is not None:
                span.set_attribute(name, value)
        request_id = self._request_ids.get(record.parent_id)
        if request_id is not None and self._known.get(record.parent_id) is None:
            span.set_attribute(schema.REQUEST_ID, request_id)
        if record.error:
            span.set_attribute(schema.ERROR_TYPE, record.error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(record.end_ns + self._clock_offset)
        self._keep(record.span_id, span)
        for waiting in self._waiting.pop(record.span_id, ()):
            self._finish(waiting)

    def _keep(self, span_id: int, span: Span | None) -> None:
        for kept in (self._known, self._requests, self._request_ids, self._open):
            _bound(kept)
        self._known[span_id] = span


def _bound(kept: dict[Any, Any]) -> None:
    while len(kept) >= _KEPT:
        del kept[next(iter(kept))]
