"""Who used a run: tenants are told by a header or W3C baggage, and share the steps' device time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from sgl_aspects.analysis.spans import Span, read_spans
from sgl_aspects.analysis.usage import usage_of
from sgl_aspects.cli.main import main
from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.tracing import attach
from sgl_aspects.tracing.export.metrics import EngineMetrics
from sgl_aspects.tracing.options import tenant_of
from sgl_aspects.tracing.records import RequestBegin, SpanEnd
from sgl_aspects.tracing.schema import INPUT_TOKENS, OUTPUT_TOKENS, REQUEST
from tests.support.simulated_run import SimulatedRun
from tests.support.tiny_models import make_llama

pytestmark = pytest.mark.usefixtures("forked_collectors", "forked_schedulers")


@pytest.mark.parametrize(
    ("source", "headers", "tenant"),
    [
        ("x-tenant", {"x-tenant": "acme"}, "acme"),
        ("x-tenant", {}, ""),
        ("x-tenant", None, ""),
        ("baggage:team", {"baggage": "a=1, team=ki%20lab;p=1"}, "ki lab"),
        ("baggage:team", {"baggage": "other=x"}, ""),
        ("", {"x-tenant": "acme"}, ""),
    ],
)
def test_what_names_a_tenant(source: str, headers: dict[str, str] | None, tenant: str) -> None:
    assert tenant_of(headers, source) == tenant


def test_a_label_has_few_values() -> None:
    reader = InMemoryMetricReader()
    metrics = EngineMetrics(MeterProvider([reader]).get_meter("test"))
    for number in range(60):
        begin = RequestBegin(1, "r", 0, 1, 0, False, "", False, "chat", {"sgl_aspects.tenant": f"t{number}"})
        metrics.request_ended(begin, SpanEnd(REQUEST, 1, 1, 0, 0, 10), 0)
    data = reader.get_metrics_data()
    assert data is not None
    (duration,) = [
        metric
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        if metric.name == "gen_ai.server.request.duration"
    ]
    tenants = [str((point.attributes or {})["sgl_aspects.tenant"]) for point in duration.data.data_points]
    assert len(tenants) == 51
    assert "other" in tenants


def test_spans_that_a_collector_repeats_when_it_is_started_again_count_once(tmp_path: Path) -> None:
    file = SimulatedRun(5).write(tmp_path / "run.jsonl")
    once = usage_of(read_spans(file))
    file.write_text(file.read_text() * 2)
    assert usage_of(read_spans(file)) == once


def test_a_request_on_a_prefill_and_a_decode_server_counts_once() -> None:
    """A prefill server's alone counts, too: its other half was not given, or it failed before."""

    def half(trace: str, role: str, output: int) -> Span:
        attributes = {INPUT_TOKENS: 100, OUTPUT_TOKENS: output}
        return Span("chat", trace, f"{trace}{role}", "", True, 0, 9, attributes, (), 1, False, role, role)

    spans = [half("a", "prefill", 1), half("a", "decode", 8), half("b", "prefill", 1)]
    (usage,) = usage_of(spans)
    assert (usage.requests, usage.input_tokens, usage.output_tokens) == (2, 200, 9)


def test_tenants_share_the_device_time_of_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also that of a request that is aborted."""
    monkeypatch.setenv("SGL_ASPECTS_TRACE_TENANT", "X-Tenant")
    make_llama(tmp_path)
    file = tmp_path / "spans.jsonl"
    with (
        attach(level=3, exporters=["otlp-json-file"], file=str(file)),
        Engine(model_path=tmp_path) as engine,
    ):
        handles = [
            engine.submit(
                [7 + number] * 20,
                SamplingParams(max_new_tokens=40, ignore_eos=True),
                external_trace_header={"x-tenant": tenant},
            )
            for number, tenant in enumerate(["small", "large", "large", "gone"])
        ]
        next(iter(handles[3]))
        handles[3].abort()
        for handle in handles[:3]:
            handle.result()
    spans = read_spans(file)
    usage = {each.name: each for each in usage_of(spans, first_token=60, between_tokens=60)}
    assert set(usage) == {"small", "large", "gone"}
    device = {
        span.trace_id: span.number("sgl_aspects.forward.device_time") or span.seconds
        for span in spans
        if span.name == "forward"
    }
    linked = {span.trace_id for span in spans if span.name == "scheduler.step" and span.links}
    total = sum(seconds for trace, seconds in device.items() if trace in linked)
    assert sum(each.device_seconds for each in usage.values()) == pytest.approx(total, rel=0.1)
    assert usage["large"].device_seconds > usage["small"].device_seconds > usage["gone"].device_seconds > 0
    assert usage["large"].output_tokens == 80
    assert (usage["large"].goodput, usage["gone"].in_time, usage["gone"].failed) == (1.0, 0, 0)
    assert main(["usage", str(file), "--ttft", "60"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[2].split()[:2] == ["large", "2"]
    assert main(["usage", str(file), "--by", "modl"]) == 2
    told = capsys.readouterr().err
    assert "--by modl: no request has this attribute; choose from tenant, model, error.type, gen_ai." in told


def test_a_callers_mistake_is_no_target_missed() -> None:
    def request(number: int, status: int) -> Span:
        attributes = {"http.response.status_code": status}
        return Span(
            "chat", str(number), str(number), "", True, 0, 1_000_000, attributes, (), is_error=status == 500
        )

    (usage,) = usage_of([request(1, 200), request(2, 400), request(3, 500)])
    assert (usage.requests, usage.not_judged, usage.in_time, usage.goodput) == (3, 1, 1, 0.5)
    (refused,) = usage_of([request(1, 400)])
    assert refused.goodput is None


def test_targets_are_judged_as_by_the_metric() -> None:
    """Without a first token there is no time between tokens; what was seen in part is left out."""

    def request(number: int, **more: Any) -> Span:
        attributes = {"gen_ai.usage.output_tokens": 11, **more}
        return Span("chat", str(number), str(number), "", True, 0, 1_000_000_000, attributes, ())

    spans = [
        request(1),
        request(2, **{"gen_ai.latency.time_to_first_token": 0.1}),
        request(3, **{"gen_ai.latency.time_to_first_token": 0.6}),
        request(4, **{"sgl_aspects.attached": True}),
    ]
    (usage,) = usage_of(spans, between_tokens=0.05)
    assert (usage.requests, usage.in_time, usage.goodput) == (4, 2, 2 / 3)
