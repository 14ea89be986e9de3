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
from opentelemetry.trace import INVALID_SPAN, Span, SpanContext, SpanKind, StatusCode, TraceFlags, TraceState

from sgl_aspects import __version__
from sgl_aspects.run import clock
from sgl_aspects.tracing import schema
from sgl_aspects.tracing.context import Opened, enter
from sgl_aspects.tracing.export.metrics import STEP, EngineMetrics
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.open_steps import OpenSteps
from sgl_aspects.tracing.record.recorder import Recorder, SpanWriter, id_source
from sgl_aspects.tracing.record.steps import spans_of
from sgl_aspects.tracing.records import Event, RequestBegin, RequestSeen, SpanEnd, SpanType

_MOST = 4096


class _Latest(dict[Any, Any]):
    """Keeps the latest entries: what waits for a span that never comes is forgotten."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        if len(self) > _MOST:
            del self[next(iter(self))]


class SdkRecorder(Recorder):
    """Records with OpenTelemetry's global provider."""

    def __init__(self, level: int) -> None:
        self.steps = OpenSteps.in_memory()
        self.steps.words[layout.WORD_LEVEL], self.steps.words[layout.WORD_SAMPLE] = level, layout.SAMPLE_ALL
        self.new_id: Callable[[], int] = id_source()
        self._clock_offset = clock.unix_offset()
        self._tracer = trace.get_tracer("sgl_aspects", __version__)
        self._metrics = EngineMetrics(metrics.get_meter("sgl_aspects", __version__))
        self._lock = threading.RLock()
        self._texts = [""]
        #: By the id of a span, a key or a group; the last two by the parent that spans wait for, the request.
        self._begun, self._open, self._known, self._request_ids = (_Latest() for _ in range(4))
        self._groups, self._waiting, self._requests = (_Latest() for _ in range(3))

    def close(self) -> None:
        """Leave open spans open; flushing is up to the application, whose provider it is."""
        self.steps.words[layout.WORD_LEVEL] = 0

    def text(self, text: str) -> int:
        if text not in self._texts:
            self._texts.append(text)
        return self._texts.index(text)

    def write_group(self, key: int, links: Sequence[int]) -> bool:
        self._groups[key] = [*links]
        return True

    def end_step(self, steps: OpenSteps, block: int) -> None:
        words = steps.words[block : block + layout.STEP_WORDS].tolist()
        steps.words[block] = 0
        links = self._groups.get(words[layout.STEP_GROUP], ())
        for span in spans_of(words, self._texts.__getitem__, links):
            self.take(span)

    def spans(self, type: SpanType) -> SpanWriter:
        return lambda *fields, **named: self.take(SpanEnd(type, *fields, **named))

    def write(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, RequestSeen):
                self._known[event.key] = self._requests.get(event.request_id)
                self._request_ids[event.key] = event.request_id
            elif isinstance(event, RequestBegin):
                flags, state = TraceFlags(event.sampled), TraceState.from_header([event.trace_state])
                caller = SpanContext(event.trace_id, event.parent_id, event.remote, flags, state)
                parent, values = trace.NonRecordingSpan(caller), dict(event.attributes)
                # For the provider's sampler; and again, for the span gets only what the sampler returns.
                span = self._start(event.name, parent, event.start_ns, SpanKind.SERVER, values)
                span.set_attributes(values)
                self._known[event.span_id] = self._open[event.span_id] = span
                self._requests[event.request_id], self._begun[event.span_id] = span, event

    def announce(self, type: SpanType, span_id: int, root_id: int, parent_id: int, start_ns: int) -> None:
        if not parent_id or parent_id in self._known:  # otherwise its end is used
            self.open_span(type, span_id, root_id, parent_id, start_ns)

    def open_span(self, type: SpanType, span_id: int, root_id: int, parent_id: int, start_ns: int) -> Any:
        with self._lock:
            if span_id not in self._open:
                span = self._start(type.name, self._known.get(parent_id), start_ns)
                self._open[span_id] = self._known[span_id] = span
            return self._open[span_id]

    def enter(self, *fields: Any, **named: Any) -> Opened:
        return enter(*fields, **named, span=self.open_span(*fields[:5]))

    def _start(
        self,
        name: str,
        parent: Span | None,
        start_ns: int,
        kind: SpanKind = SpanKind.INTERNAL,
        values: Any = None,
    ) -> Span:
        context = trace.set_span_in_context(parent or INVALID_SPAN, Context())
        return self._tracer.start_span(name, context, kind, values, start_time=start_ns + self._clock_offset)

    def take(self, span: SpanEnd) -> None:
        with self._lock:
            if span.type.name == STEP:
                self._metrics.step_ended("", os.getpid(), span)
            if (begin := self._begun.pop(span.span_id, None)) is not None:
                self._metrics.request_ended(begin, span, 0)
            if span.parent_id and span.parent_id not in self._known:
                self._waiting[span.parent_id] = [*self._waiting.get(span.parent_id, ()), span]
            elif span.span_id:  # else for the metrics only
                self._finish(span)

    def _finish(self, record: SpanEnd) -> None:
        parent = self._known.get(record.parent_id)
        span = self._open.pop(record.span_id, None) or self._start(record.type.name, parent, record.start_ns)
        for linked in filter(None, map(self._known.get, record.links)):
            span.add_link(linked.get_span_context())
        values = dict(zip(record.type.attributes, record.values))
        if record.parent_id in self._request_ids and parent is None:
            values[schema.REQUEST_ID] = self._request_ids[record.parent_id]
        if record.error:
            values[schema.ERROR_TYPE] = record.error
            span.set_status(StatusCode.ERROR)
        span.set_attributes({name: value for name, value in values.items() if value is not None})
        span.end(record.end_ns + self._clock_offset)
        self._known[record.span_id] = span
        for waiting in self._waiting.pop(record.span_id, ()):
            self._finish(waiting)
