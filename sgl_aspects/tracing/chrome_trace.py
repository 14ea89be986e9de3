"""Spans as a Chrome trace, which ui.perfetto.dev and chrome://tracing open: one timeline of all processes.

A process of the engine is a process there. What can overlap must not share a track: the scheduler's steps
have one, and each request has its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

_STEP_TRACK = 1
# Requests that are not open at the same time could share a track; so many tracks are told apart.
_TRACKS = 1 << 20


class ChromeTraceExporter(SpanExporter):
    """Writes ``path`` event by event: it can be opened at any time, the closing bracket may be missing.

    Raises ``OSError`` at once where the file cannot be written.
    """

    def __init__(self, path: str, *, append: bool = False) -> None:
        is_new = not append or not Path(path).exists()
        self._file = Path(path).open("w" if is_new else "a", encoding="utf-8")  # noqa: SIM115 (open as long as it)
        if is_new:
            self._file.write("[")
        self._named: set[tuple[int, int]] = set()
        self._separator = "\n" if is_new else ",\n"

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        for event in events_of(spans, self._named):
            self._file.write(self._separator + json.dumps(event, separators=(",", ":")))
            self._separator = ",\n"
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.write("\n]\n")
        self._file.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def events_of(spans: Iterable[ReadableSpan], named: set[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """A complete event ("X", microseconds) for each span; names of its process and track come first.

    ``named`` remembers which were told.
    """
    for span in spans:
        context = span.get_span_context()
        if context is None or span.start_time is None or span.end_time is None:
            continue
        attributes = dict(span.attributes or {})
        process_id = int(str(span.resource.attributes.get("process.pid", 0)))
        is_request = "sgl_aspects.step.id" not in attributes and _is_of_request(span)
        track = 2 + context.trace_id % _TRACKS if is_request else _STEP_TRACK
        yield from _names(
            process_id, track, f"request {context.trace_id:032x}" if is_request else "steps", named
        )
        args: dict[str, Any] = {key: _in_json(value) for key, value in attributes.items()}
        args["trace_id"], args["span_id"] = f"{context.trace_id:032x}", f"{context.span_id:016x}"
        if span.links:
            args["links"] = [f"{link.context.trace_id:032x}" for link in span.links]
        yield {
            "name": span.name,
            "cat": "request" if is_request else "scheduler",
            "ph": "X",
            "ts": span.start_time / 1e3,
            "dur": (span.end_time - span.start_time) / 1e3,
            "pid": process_id,
            "tid": track,
            "args": args,
        }


def _in_json(value: Any) -> Any:
    """The value, or text where JSON has no number for it: a viewer refuses the whole file."""
    if isinstance(value, (list, tuple)):
        return [_in_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_STEP_NAMES = ("scheduler.step", "schedule", "run_batch", "sample", "process_result", "forward")


def _is_of_request(span: ReadableSpan) -> bool:
    return span.name not in _STEP_NAMES


def _names(process_id: int, track: int, name: str, named: set[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for key, kind, text in (
        ((process_id, 0), "process_name", f"process {process_id}"),
        ((process_id, track), "thread_name", name),
    ):
        if key not in named:
            named.add(key)
            yield {"name": kind, "ph": "M", "pid": process_id, "tid": key[1], "args": {"name": text}}
