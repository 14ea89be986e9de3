"""Spans as a Chrome trace for ui.perfetto.dev and chrome://tracing: one timeline of all processes.

A process of the engine is a process there; each request has a track in every process that it passed through,
joined by arrows (flows). The scheduler's steps have a track, two if they overlap. Device time has a track of
its own, and so have the kernels of each stream; batch, queue and KV cache are counters.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext

from sgl_aspects.tracing import schema
from sgl_aspects.tracing.context import root_of_trace_id
from sgl_aspects.tracing.export.shared_file import SharedFile
from sgl_aspects.tracing.records import Latest

_STEP = schema.STEP.name
_OF_REQUESTS = ("tokenize", "queue", "prefill", "decode", "detokenize")
# The process's role, by the spans that it records.
_PROCESSES = {
    "tokenize": "requests",
    "detokenize": "requests",
    "queue": "scheduler",
    "prefill": "scheduler",
    "decode": "scheduler",
    _STEP: "scheduler",
    "load_model": "scheduler",
    "init_kv_cache": "scheduler",
    "capture_graphs": "scheduler",
}
_COUNTERS = {
    "batch": {"requests": schema.BATCH_SIZE},
    "queue": {"waiting": schema.QUEUE_WAITING, "running": schema.QUEUE_RUNNING},
    "KV cache": {"usage": schema.KV_USAGE},
}
# Tracks of a process: steps and other work from 1 on, devices from 100 on, their streams from 200 on (in the
# first are the kernels that are summed up), requests from 1000 on.
_WORK_TRACKS, _DEVICE_TRACKS, _STREAM_TRACKS, _REQUEST_TRACKS = 1, 100, 201, 1000
# Cap on requests that keep their tracks, since more spans may follow.
_MOST_TRACKS = 1 << 16
# Closes the array after the last event.
_END = b"\n]\n"
_FLOW_IDS = (1 << 63) - 1
# Above any process's own number.
_OTHER_HOST = 1 << 22


class ChromeTraceExporter(SpanExporter):
    """Adds to the JSON array in ``path``, which is complete after each export.

    ``append``: go on with the file's contents; other collectors may do so at the same time. Raises
    ``OSError`` at once if the file cannot be written.
    """

    def __init__(self, path: str, *, append: bool = False) -> None:
        self._file = SharedFile(path, append=append)
        if not self._file.is_regular:
            raise OSError(errno.ESPIPE, "it is not a regular file, so its end cannot be replaced")
        self._timeline = Timeline()
        self._add([])

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._file.is_closed:  # the time for the last flush has passed
            return SpanExportResult.FAILURE
        self._add([json.dumps(event, separators=(",", ":")) for event in self._timeline.events_of(spans)])
        return SpanExportResult.SUCCESS

    def _add(self, events: list[str]) -> None:
        with self._file.locked() as size:
            tail = self._file.read(4, max(0, size - 4))
            # Without its end, the file is that of a killed collector: cut after its last whole line.
            last = next((each for each in (_END, b",\n", b"\n") if tail.endswith(each)), b"")
            end = size - len(last)
            begin = "" if size else "["
            separator = "\n" if end <= 1 else ",\n"
            try:
                text = begin + (separator if events else "") + ",\n".join(events)
                self._file.write(text.encode() + _END, end)
            except OSError:
                self._file.write(_END if size else b"", end)
                raise

    def shutdown(self) -> None:
        self._file.close()


class Timeline:
    """Turns spans into events in any order: by end, as a collector has them, or by start.

    Every span is a complete event ("X", microseconds), preceded by the names of its process and track.
    ``names_hosts``: the spans are of several hosts. A viewer cannot group processes: those of a host follow
    one another, with its name before theirs.
    """

    def __init__(self, *, names_hosts: bool = False) -> None:
        self._names_hosts = names_hosts
        self._named: set[tuple[int, int]] = set()
        self._numbers: dict[tuple[str, str, int], int] = {}  # processes by host, run and process id
        self._labels: dict[int, tuple[int, str]] = {}
        self._hosts: dict[str, int] = {}  # in order of arrival
        # track by (trace, request's span)
        self._requests: Latest[tuple[int, int], int] = Latest(_MOST_TRACKS)
        self._lanes: dict[int, list[_Lane]] = {}  # by process
        # track and end of the last span, by device
        self._devices: dict[tuple[int, str], tuple[int, int]] = {}
        self._next_track = _REQUEST_TRACKS

    def events_of(self, spans: Iterable[ReadableSpan]) -> Iterator[dict[str, Any]]:
        """Yield the events of these spans; keeps the names and tracks that later spans need."""
        for span in spans:
            context = span.get_span_context()
            if context is None or span.start_time is None or span.end_time is None:
                continue
            process_id = self._number_of(span)
            attributes = dict(span.attributes or {})
            if span.name == schema.KERNEL.name:
                yield from self._kernel_events(span, context, attributes, process_id)
            elif span.name in _OF_REQUESTS or not root_of_trace_id(context.trace_id):
                yield from self._request_events(span, context, attributes, process_id)
            else:
                yield from self._work_events(span, context, attributes, process_id)

    def _number_of(self, span: ReadableSpan) -> int:
        """Return the process's number, or another one if a process of another host or run has the same."""
        process_id = int(str(span.resource.attributes.get("process.pid", 0)))
        host = str(span.resource.attributes.get("host.name", ""))
        key = host, str(span.resource.attributes.get(schema.SERVICE_INSTANCE, "")), process_id
        if key not in self._numbers:
            taken = set(self._numbers.values())
            self._numbers[key] = next(n for n in itertools.count(process_id, _OTHER_HOST) if n not in taken)
            self._hosts.setdefault(host, len(self._hosts))
            self._labels[self._numbers[key]] = process_id, host
        return self._numbers[key]

    def _request_events(
        self, span: ReadableSpan, context: SpanContext, attributes: dict[str, Any], process_id: int
    ) -> Iterator[dict[str, Any]]:
        # A request's span has the request's id; spans below refer to it as their parent.
        parent = None if schema.REQUEST_ID in attributes else span.parent
        span_id = context.span_id if parent is None else parent.span_id
        key = context.trace_id, span_id
        if key not in self._requests:
            self._requests[key] = self._next_track
            self._next_track += 1
        track = self._requests[key]
        yield from self._names(
            process_id, track, f"request {span_id:016x}", _PROCESSES.get(span.name, "requests")
        )
        event = _complete(span, context, attributes, process_id, track, "request")
        # The first span of a flow starts the arrow, the others continue it in order of time.
        yield (
            event
            | {"bind_id": hex(span_id & _FLOW_IDS), "flow_out": True}
            | ({} if parent is None else {"flow_in": True})
        )

    def _work_events(
        self, span: ReadableSpan, context: SpanContext, attributes: dict[str, Any], process_id: int
    ) -> Iterator[dict[str, Any]]:
        lane, track = self._lane(span, context, process_id)
        kind = _PROCESSES.get(span.name, "process")
        yield from self._names(process_id, track, "steps" if track == _WORK_TRACKS else f"steps {lane}", kind)
        event = _complete(span, context, attributes, process_id, track, "scheduler")
        if span.links:
            event["args"]["links"] = [f"{link.context.trace_id:032x}" for link in span.links]
        yield event
        if span.name == _STEP:
            yield from _counters(attributes, process_id, event["ts"])
        seconds: Any = attributes.get(schema.DEVICE_TIME)
        if _is_number(seconds) and seconds >= 0:
            yield from self._device_events(span, attributes, process_id, seconds)

    def _kernel_events(
        self, span: ReadableSpan, context: SpanContext, attributes: dict[str, Any], process_id: int
    ) -> Iterator[dict[str, Any]]:
        stream: Any = attributes.get(schema.KERNEL_STREAM)
        number = stream if _is_number(stream) else 0
        track = _STREAM_TRACKS + int(number) % (_REQUEST_TRACKS - _STREAM_TRACKS)
        name = "other kernels, summed up" if number < 0 else f"kernels, stream {number}"
        yield from self._names(process_id, track, name, "scheduler")
        event = _complete(span, context, attributes, process_id, track, "kernel")
        yield event | {"name": str(attributes.get(schema.KERNEL_NAME, span.name))}

    def _lane(self, span: ReadableSpan, context: SpanContext, process_id: int) -> tuple[int, int]:
        """Choose a track on which the span's trace does not overlap another: steps and threads' functions
        may.
        """
        lanes = self._lanes.setdefault(process_id, [])
        start, end = span.start_time or 0, span.end_time or 0
        found = next((lane for lane in lanes if lane.trace_id == context.trace_id), None)
        if found is None:
            found = next((lane for lane in lanes if lane.has_ended and lane.end <= start), None)
        if found is None:
            if len(lanes) < _DEVICE_TRACKS - _WORK_TRACKS:
                lanes.append(_Lane())
            found = lanes[-1]
        if found.trace_id != context.trace_id:
            found.trace_id, found.has_ended = context.trace_id, False
        found.end = max(found.end, end)
        found.has_ended = found.has_ended or span.parent is None
        number = lanes.index(found)
        return number + 1, _WORK_TRACKS + number

    def _device_events(
        self, span: ReadableSpan, attributes: dict[str, Any], process_id: int, seconds: float
    ) -> Iterator[dict[str, Any]]:
        """Estimate when the device began: not before the pass was launched or its last work ended."""
        name = str(attributes.get(schema.DEVICE_NAME, "device"))
        track, last_end = self._devices.get((process_id, name), (_DEVICE_TRACKS + len(self._devices), 0))
        start = max(span.start_time or 0, last_end)
        end = start + round(seconds * 1e9)
        self._devices[process_id, name] = track, end
        yield from self._names(process_id, track, f"device {name}", "scheduler")
        yield {
            "name": str(attributes.get(schema.MODE, "forward")),
            "cat": "device",
            "ph": "X",
            "ts": start / 1e3,
            "dur": end / 1e3 - start / 1e3,
            "pid": process_id,
            "tid": track,
            "args": {"batch": _in_json(attributes.get(schema.BATCH_SIZE))},
        }

    def _names(self, process_id: int, track: int, name: str, process: str) -> Iterator[dict[str, Any]]:
        own_id, host = self._labels.get(process_id, (process_id, ""))
        label = f"{host}: {process} {own_id}" if self._names_hosts else f"{process} {own_id}"
        for key, kind, text in (
            ((process_id, 0), "process_name", label),
            ((process_id, track), "thread_name", name),
        ):
            if key not in self._named:
                self._named.add(key)
                yield _metadata(kind, process_id, key[1], {"name": text})
                if not key[1] and self._names_hosts:
                    index = {"sort_index": self._hosts[host]}
                    yield _metadata("process_sort_index", process_id, 0, index)
                if key[1]:
                    yield _metadata("thread_sort_index", process_id, key[1], {"sort_index": key[1]})


class _Lane:
    """A track for traces that do not overlap."""

    def __init__(self) -> None:
        self.trace_id = 0
        self.end = 0
        self.has_ended = True


def _metadata(kind: str, process_id: int, track: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process_id, "tid": track, "args": args}


def _complete(
    span: ReadableSpan,
    context: SpanContext,
    attributes: dict[str, Any],
    process_id: int,
    track: int,
    category: str,
) -> dict[str, Any]:
    start, end = (span.start_time or 0) / 1e3, (span.end_time or 0) / 1e3
    args: dict[str, Any] = {key: _in_json(value) for key, value in attributes.items()}
    args["trace_id"], args["span_id"] = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    return {
        "name": span.name,
        "cat": category,
        "ph": "X",
        "ts": start,
        "dur": end - start,  # from the rounded times, so that nested events stay nested
        "pid": process_id,
        "tid": track,
        "args": args,
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _in_json(value: Any) -> Any:
    """Return the value, or its text if JSON has no number for it: a viewer rejects the whole file."""
    if isinstance(value, (list, tuple)):
        return [_in_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _counters(attributes: dict[str, Any], process_id: int, ts: float) -> Iterator[dict[str, Any]]:
    for name, series in _COUNTERS.items():
        found = {label: attributes.get(key) for label, key in series.items()}
        values = {label: value for label, value in found.items() if _is_number(value)}
        if values:
            yield {"name": name, "cat": "scheduler", "ph": "C", "ts": ts, "pid": process_id, "args": values}
