"""Tracing without an engine: a caller's side and a scheduler's, and the spans in the file."""

from __future__ import annotations

import base64
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict  # type: ignore[import-untyped]
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanKind

from sgl_aspects.tracing import TraceSession, context
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.export.span import UNSET, CollectedSpan, RootContext
from sgl_aspects.tracing.records import RequestBegin, RequestSent, SpanType
from tests.support import workers
from tests.support.otlp_receiver import Span, spans_of
from tests.support.processes import command, output_of

spawn = multiprocessing.get_context("spawn")
REQUEST = SpanType("request", {"gen_ai.usage.output_tokens": int})


def begin(session: TraceSession, rid: str, origin: TraceContext | None = None) -> Callable[..., int]:
    """Records the caller's side of a request; the function returned ends it and gives its span id."""
    recorder, start = session.recorder, time.monotonic_ns()
    span_id = recorder.new_id()
    recorder.write(
        RequestBegin(span_id, rid, start, *(origin or context.new()), "chat m", {"gen_ai.request.id": rid})
    )
    recorder.write(RequestSent(span_id))

    def end(error: str = "") -> int:
        recorder.spans(REQUEST)(span_id, span_id, 0, start, time.monotonic_ns(), [3], error)
        return span_id

    return end


def collected(span_id: int) -> CollectedSpan:
    ids = RootContext(1, 2), span_id, 0, False
    return CollectedSpan(Resource({}), *ids, SpanKind.INTERNAL, "s", 1, 2, {}, [], None, [], UNSET)


def run_scheduler(session: TraceSession, rids: list[str], ending: str = "end") -> None:
    process = spawn.Process(target=workers.record_like_a_scheduler, args=(session.run_folder, rids, ending))
    process.start()
    process.join(60)
    process.close()


def read_file(path: Path) -> Iterator[Span]:
    """The spans of an OTLP-JSON file, read with protobuf, whose own JSON has ids in base64."""

    def restore(value: Any) -> Any:
        if isinstance(value, list):
            return [restore(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {
            key: base64.b64encode(bytes.fromhex(item)).decode() if key in ids else restore(item)
            for key, item in value.items()
        }

    ids = ("traceId", "spanId", "parentSpanId")
    for line in path.read_text().splitlines():
        yield from spans_of(ParseDict(restore(json.loads(line)), TracesData()))


def unsampled() -> TraceContext:
    return TraceContext(context.new().trace_id, sampled=False)


def traced_program(
    folder: Path, declared: str, program: str, *options: str
) -> tuple[dict[str, list[Span]], str]:
    """Run a program under a configuration file; return its spans by name, and what it logged."""
    (folder / "program.py").write_text(program)
    (folder / "aspects.toml").write_text(declared)
    (file := folder / "spans.jsonl").write_text("")
    words = ["--config", "aspects.toml", "--file", str(file), *options, "--", sys.executable, "program.py"]
    done = command("run", *words, cwd=folder, without=("OTEL_", "SGL_ASPECTS_", "ASPECTS_"))
    output_of(done)
    found: dict[str, list[Span]] = {}
    for span in read_file(file):
        found.setdefault(span.name, []).append(span)
    return found, done.stderr
