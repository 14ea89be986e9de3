"""One span with four attributes, made by each of the tracers that are compared (see benchmarks/spans.py).

A tracer is made once in a process of its own, with the URL of its backend; ``span()`` is what is measured.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from sgl_aspects.tracing.records import SpanType

ATTRIBUTES: dict[str, Any] = {"mode": "decode", "size": 12, "tokens": 12, "share": 0.25}
FORWARD = SpanType("forward", {"mode": str, "size": int, "tokens": int, "share": float})
QUEUE = 1 << 20  # large enough that nothing is dropped at a benchmark's rate


class Tracer(NamedTuple):
    """``flush`` waits until the process's own part is done; ``collector`` is another process's id, or 0."""

    span: Callable[[], None]
    flush: Callable[[], None] = lambda: None
    collector: int = 0
    close: Callable[[], object] = lambda: None


def ours(url: str, current: bool = False) -> Tracer:
    """The flight recorder, with a collector that exports over OTLP."""
    from sgl_aspects.tracing import attach
    from sgl_aspects.tracing.context import leave

    if current:
        import opentelemetry.trace  # noqa: F401  (a process that uses OpenTelemetry)
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "200"
    session = attach(endpoint=url)
    recorder, clock = session.recorder, time.monotonic_ns
    new_id, enter, write = recorder.new_id, recorder.enter, recorder.spans(FORWARD)

    def span() -> None:
        start, span_id = clock(), new_id()
        write(span_id, span_id, 0, start, clock(), ("decode", 12, 12, 0.25))

    def current_span() -> None:
        start, span_id = clock(), new_id()
        opened = enter(FORWARD, span_id, span_id, 0, start)
        leave(opened)
        write(span_id, span_id, 0, start, clock(), ("decode", 12, 12, 0.25))

    return Tracer(
        current_span if current else span,
        collector=session.collector_process_id or 0,
        close=lambda: session.close(30),
    )


def otel_sdk(url: str) -> Tracer:
    """OpenTelemetry's SDK with its batch processor, OTLP over HTTP."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    exporter = OTLPSpanExporter(url + "/v1/traces")
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUE))
    tracer = provider.get_tracer("bench")

    def span() -> None:
        with tracer.start_as_current_span("forward") as current:
            current.set_attributes(ATTRIBUTES)

    return Tracer(span, lambda: _flush(provider))


def sglang_trace(url: str) -> Tracer:
    """A slice with attributes, by SGLang's own module, which needs three things of the rest of SGLang."""
    from benchmarks.peers import sglang_sources

    source = sglang_sources("sglang/srt/observability/trace.py", "sglang/srt/environ.py")
    if source is None:
        raise ModuleNotFoundError("sglang's wheel")
    packages = {"sglang": ".", "sglang.srt": "srt", "sglang.srt.observability": "srt/observability"}
    for name, folder in packages.items():
        package = types.ModuleType(name)
        package.__path__ = [str(source / folder)]
        sys.modules[name] = package
    resources = types.SimpleNamespace(trace_level=3)
    context, utils = types.ModuleType("sglang.srt.runtime_context"), types.ModuleType("sglang.srt.utils")
    context.__dict__["get_resources"] = lambda: resources
    utils.__dict__["get_int_env_var"] = lambda name, default=0: int(os.environ.get(name, default))
    sys.modules[context.__name__], sys.modules[utils.__name__] = context, utils
    os.environ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] = "http/protobuf"
    os.environ["OTEL_BSP_MAX_QUEUE_SIZE"] = str(QUEUE)
    module = importlib.import_module("sglang.srt.observability.trace")
    module.process_tracing_init(url + "/v1/traces", "bench")
    module.trace_set_thread_info("scheduler")
    request = module.TraceReqContext("r1", module_name="request")
    request.trace_req_start()

    def span() -> None:
        request.trace_slice_start("forward", 1)
        request.trace_slice_end("forward", 1, attrs=ATTRIBUTES)

    from opentelemetry import trace

    return Tracer(span, lambda: _flush(trace.get_tracer_provider()))


TRACERS: dict[str, Callable[[str], Tracer]] = {
    "ours": ours,
    "ours, as the current span": partial(ours, current=True),
    "OTel SDK, batch, OTLP": otel_sdk,
    "SGLang's trace module, OTLP": sglang_trace,
}


def _flush(provider: Any) -> None:
    if not provider.force_flush(120_000):
        raise RuntimeError("not everything was exported")
