"""``SGL_ASPECTS_RECORDER=sdk``: the same spans through the ``TracerProvider`` of the application.

For applications with processors, samplers and exporters of their own in the engine's processes, at the cost
of the SDK; they flush their provider. Each process reports for itself: spans are not joined, so in a process
without a request's trace, the spans of that request begin traces of their own and carry its id. The metrics
go to the application's ``MeterProvider``, likewise process by process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry import context, metrics, trace

from sgl_aspects import __version__
from sgl_aspects.run import clock
from sgl_aspects.tracing import records, schema
from sgl_aspects.tracing.export.metrics import DECODE, STEP, EngineMetrics
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.open_steps import OpenSteps
from sgl_aspects.tracing.record.recorder import Recorder, SpanWriter, id_source
from sgl_aspects.tracing.record.steps import spans_of
from sgl_aspects.tracing.records import Latest, SpanType

_MOST = 4096


class SdkRecorder(Recorder):
    """Records with OpenTelemetry's global provider: a whole span at its end, unless it was current."""

    def __init__(self, level: int) -> None:
        self.steps = OpenSteps.in_memory((level, level, layout.SAMPLE_ALL))
        self.new_id: Callable[[], int] = id_source()
        self._clock_offset = clock.unix_offset()
        self._tracer = trace.get_tracer("sgl_aspects", __version__)
        self._metrics = EngineMetrics(metrics.get_meter("sgl_aspects", __version__))
        self._lock = threading.RLock()
        self._texts = {"": 0}
        # The latest, since some end without a record: spans by id, and what began them; the spans of requests
        # by request id, and with it by key (None: of another process); links by group.
        kept = [Latest[Any, Any](_MOST) for _ in range(6)]
        self._open, self._ended, self._begun, self._requests, self._seen, self._groups = kept

    def text(self, text: str) -> int:
        with self._lock:
            return self._texts.setdefault(text, len(self._texts))

    def write_group(self, key: int, links: Sequence[int]) -> bool:
        self._groups[key] = [*links]
        return True

    def end_step(self, steps: OpenSteps, block: int) -> None:
        words = steps.words[block : block + layout.STEP_WORDS].tolist()
        steps.words[block] = 0
        links = self._groups.get(words[layout.STEP_GROUP], ())
        for span in spans_of(words, [*self._texts].__getitem__, links):
            self.take(span)

    def spans(self, type: SpanType) -> SpanWriter:
        return lambda *fields, **named: self.take(records.SpanEnd(type, *fields, **named))

    def write(self, event: records.Event) -> None:
        with self._lock:
            if isinstance(event, records.RequestSeen):
                self._seen[event.key] = self._requests.get(event.request_id), event.request_id
            elif isinstance(event, records.RequestElsewhere):
                self._seen[event.key] = _caller(*event[1:]), ""
            elif isinstance(event, records.ProcessDescribed) and schema.FOLLOWER in event.attributes:
                self._metrics.follow("")
            elif isinstance(event, records.RequestBegin):
                # Attributes for the provider's sampler; and again, for the span gets only what it returns.
                found = {"kind": trace.SpanKind.SERVER, "attributes": event.attributes}
                span = self._start(event.name, _caller(*event[3:8]), event.start_ns, **found)
                span.set_attributes(event.attributes)
                is_answer = not event.remote and event.parent_id in self._begun
                if not is_answer or schema.OPERATION in event.attributes:
                    self._begun[event.span_id] = event
                self._requests[event.request_id] = self._open[event.span_id] = span

    def open_span(self, type: SpanType, span_id: int, root_id: int, parent_id: int, start_ns: int) -> Any:
        with self._lock:
            if span_id not in self._open:
                self._open[span_id] = self._start(type.name, self._find(parent_id), start_ns)
            return self._open[span_id]

    def take(self, record: records.SpanEnd) -> None:
        type, span_id, _, parent_id, start_ns, end_ns, values, error, links = record
        with self._lock:
            if type.name == STEP:
                self._metrics.step_ended("", os.getpid(), record)
            elif type.name == DECODE:
                self._metrics.decode_ended(record)
            if (begin := self._begun.pop(span_id, None)) is not None:
                self._metrics.request_ended(begin, record, 0)
            if not span_id:  # for the metrics only
                return
            parent = self._find(parent_id)
            span = self._open.pop(span_id, None) or self._start(type.name, parent, start_ns)
            for linked in filter(None, map(self._find, links)):
                span.add_link(linked.get_span_context())
            attributes = {name: value for name, value in zip(type.attributes, values) if value is not None}
            if parent is None and parent_id in self._seen:
                attributes[schema.REQUEST_ID] = self._seen[parent_id][1]
            if error:
                attributes[schema.ERROR_TYPE] = error
                span.set_status(trace.StatusCode.ERROR)
            span.set_attributes(attributes)
            span.end(end_ns + self._clock_offset)
            self._ended[span_id] = span

    def _find(self, id: int) -> Any:
        """Return the span with this id, or that of the request with this key; None if there is none."""
        return self._open.get(id) or self._ended.get(id) or self._seen.get(id, [None])[0]

    def _start(self, name: str, parent: trace.Span | None, start_ns: int, **more: Any) -> trace.Span:
        below = trace.set_span_in_context(parent or trace.INVALID_SPAN, context.Context())
        return self._tracer.start_span(name, below, start_time=start_ns + self._clock_offset, **more)


def _caller(trace_id: int, span_id: int, sampled: bool, state: str = "", remote: bool = True) -> trace.Span:
    """Stand in for the span, not recorded here, below which a trace goes on."""
    flags, states = trace.TraceFlags(sampled), trace.TraceState.from_header([state])
    return trace.NonRecordingSpan(trace.SpanContext(trace_id, span_id, remote, flags, states))
