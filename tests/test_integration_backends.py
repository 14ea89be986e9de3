"""Real backends: what a traced engine sends is found by querying them (make test-integration)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.tracing import TraceSummary, attach
from tests.support.processes import free_port, wait_until
from tests.support.real_backends import Phoenix, phoenix, prometheus
from tests.support.tiny_models import llama_fixture

pytestmark = pytest.mark.integration

CALLER = "00f067aa0ba902b7"
REQUESTS = 6


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Phoenix]:
    with phoenix(tmp_path_factory.mktemp("phoenix")) as running:
        yield running


model = llama_fixture(max_position_embeddings=32768)


def serve(model: Path, endpoint: str, first_trace: int) -> TraceSummary:
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with attach(level=3, endpoint=endpoint) as session:
        with Engine(model_path=model, max_total_tokens=1024) as engine:
            for number in range(REQUESTS):
                headers = {"traceparent": f"00-{first_trace + number:032x}-{CALLER}-01"}
                engine.generate("hello there", sampling, rid=f"r{number}", external_trace_header=headers)
            engine.generate("long", SamplingParams(max_new_tokens=200, ignore_eos=True))
            stream = engine.stream("left", SamplingParams(max_new_tokens=900, ignore_eos=True), rid="left")
            next(stream)
            stream.close()  # type: ignore[attr-defined]  # it is a generator
        assert session.recorder.level
    return session.close()


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_phoenix_holds_whole_traces(
    backend: Phoenix, model: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    project = f"sgl-aspects-{protocol[:4]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", f"openinference.project.name={project}")
    first_trace = len(protocol) << 64  # Phoenix has a trace in one project only
    summary = serve(model, backend.endpoints[protocol], first_trace)
    # Metrics went there, too, and are refused by Phoenix: the spans do not suffer.
    assert summary.exported == {"otlp": summary.spans_recorded}
    assert summary.spans_recorded > 1000  # more than a page of its interface
    wait_until(lambda: len(backend.spans(project)) >= summary.spans_recorded, 180.0)
    spans = backend.spans(project)
    assert len(spans) == summary.spans_recorded
    assert len({span["context"]["span_id"] for span in spans}) == len(spans)

    for number in range(REQUESTS):
        trace = [span for span in spans if span["context"]["trace_id"] == f"{first_trace + number:032x}"]
        by_name: dict[str, dict[str, Any]] = {span["name"]: span for span in trace}
        root = by_name.pop("text_completion tiny")
        assert set(by_name) == {"tokenize", "queue", "prefill", "decode", "detokenize"}
        assert root["parent_id"] == CALLER
        assert {span["parent_id"] for span in by_name.values()} == {root["context"]["span_id"]}
        attributes = root["attributes"]
        assert attributes["gen_ai.request.id"] == f"r{number}"
        assert attributes["gen_ai.usage.output_tokens"] == 4
        assert attributes["gen_ai.provider.name"] == "sgl_aspects"
        assert attributes["gen_ai.response.finish_reasons"] == ["length"]
        for span in by_name.values():
            assert root["start_time"] <= span["start_time"] <= span["end_time"] <= root["end_time"]

    (left,) = [span for span in spans if span["attributes"].get("gen_ai.request.id") == "left"]
    assert left["status_code"] == "ERROR"
    assert left["attributes"]["error.type"] == "abort"
    steps = {span["context"]["span_id"] for span in spans if span["name"] == "scheduler.step"}
    runs = {span["context"]["span_id"]: span for span in spans if span["name"] == "run_batch"}
    forwards = [span for span in spans if span["name"] == "forward"]
    assert len(steps) == len(runs) == len(forwards) > REQUESTS * 4
    assert {span["parent_id"] for span in runs.values()} == steps
    assert {span["parent_id"] for span in forwards} == set(runs)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus: apt-get install prometheus")
def test_prometheus_scrapes_what_the_engine_does(model: Path, tmp_path: Path) -> None:
    port = free_port()
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with (
        attach(level=1, file=str(tmp_path / "traces.jsonl"), prometheus=port),
        prometheus(tmp_path, port) as server,
        Engine(model_path=model, max_total_tokens=20000, max_running_requests=1) as engine,
    ):
        for _ in range(REQUESTS):
            engine.generate("hello there", sampling)
        count = 'gen_ai_server_request_duration_seconds_count{gen_ai_request_model="tiny",error_type=""}'
        wait_until(lambda: server.value(count) == REQUESTS)
        assert server.value('sgl_aspects_tokens_total{gen_ai_token_type="output"}') == 4 * REQUESTS
        assert server.value("gen_ai_server_time_to_first_token_seconds_count") == REQUESTS
        quantile = "histogram_quantile(0.5, sum by (le) (gen_ai_server_request_duration_seconds_bucket))"
        median = server.value(quantile)
        assert median is not None
        assert 0 < median < 60

        long = SamplingParams(max_new_tokens=15000, ignore_eos=True)
        stream = engine.stream("long", long)
        next(stream)
        waits = engine.submit("waits", long)
        wait_until(lambda: server.value("sgl_aspects_queue_running") == 1)
        wait_until(lambda: server.value("sgl_aspects_queue_waiting") == 1)
        assert (server.value("sgl_aspects_kv_usage") or 0) > 0
        waits.abort()
        stream.close()  # type: ignore[attr-defined]  # it is a generator
        wait_until(lambda: server.value("sgl_aspects_queue_running") == 0)
        aborted = 'gen_ai_server_request_duration_seconds_count{error_type="abort"}'
        wait_until(lambda: server.value(aborted) == 2)

        types = server.types()
        assert types["gen_ai_server_request_duration_seconds"] == "histogram"
        # Scraped as OpenMetrics, whose counters have their suffix at the samples.
        assert types.get("sgl_aspects_tokens", types.get("sgl_aspects_tokens_total")) == "counter"
        assert types["sgl_aspects_kv_usage"] == "gauge"
        assert server.value('up{job="engine"}') == 1
