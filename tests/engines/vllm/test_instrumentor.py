"""`opentelemetry-instrument vllm serve MODEL` traces vLLM as `sgl-aspects run` does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("opentelemetry.instrumentation.auto_instrumentation")

from tests.support.callers import by_trace, one, orphans, parent, trace_id
from tests.support.otlp_receiver import http_receiver
from tests.support.sglang_models import make_mini
from tests.support.vllm_server import serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
LAUNCHER = (sys.executable, "-c", "from opentelemetry.instrumentation.auto_instrumentation import run; run()")


def test_requests_are_whole_and_come_once(tmp_path: Path) -> None:
    with http_receiver() as receiver:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none",
            "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        }
        model = make_mini(tmp_path / "mini")
        with serve(
            model, tmp_path / "log", prefix=LAUNCHER, more=["--dtype", "float32"], environment=environment
        ) as server:
            server.chats([f"prompt {number}" for number in range(4)], [parent(number) for number in range(4)])
        found = by_trace(receiver.spans)  # also vLLM's own spans of its start
        traces = {trace: found[trace] for trace in map(trace_id, range(4))}
        assert not orphans(traces)
        for number in range(4):
            trace = traces[trace_id(number)]
            assert one(trace, "chat mini").parent_id
            assert {"tokenize", "queue", "prefill", "decode", "detokenize"} <= {span.name for span in trace}
