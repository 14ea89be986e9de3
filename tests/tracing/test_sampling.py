"""OTEL_TRACES_SAMPLER as OpenTelemetry defines it, and the collector's choice at the end of a request."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource

from sgl_aspects.engines import EMBEDDED
from sgl_aspects.tracing import TraceSession, attach, context
from sgl_aspects.tracing.collect import join
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.serving import CallingObserver
from sgl_aspects.tracing.options import TraceOptions
from sgl_aspects.tracing.records import RequestBegin, RequestSent, SpanEnd, SpanType
from sgl_aspects.tracing.sampling import Sampler, TailChoice, sampler_from_environment
from sgl_aspects.tracing.schema import REQUEST
from sgl_aspects.tracing.settings import TraceSettings
from tests.support.collectors import kill_collector_for_good, started_again
from tests.support.memory_recorder import Memory
from tests.support.otlp_receiver import Receiver, below
from tests.support.processes import wait_until
from tests.support.sessions import begin, read_file, run_scheduler, unsampled

pytestmark = pytest.mark.usefixtures("forked_collectors")

SECOND = 1_000_000_000
CHILD = SpanType("tokenize")


@pytest.mark.parametrize(
    ("name", "argument", "sampler"),
    [
        (None, None, Sampler(1.0, True)),
        ("always_on", None, Sampler(1.0, False)),
        ("always_off", None, Sampler(0.0, False)),
        ("traceidratio", "0.25", Sampler(0.25, False)),
        ("traceidratio", None, Sampler(1.0, False)),
        ("parentbased_always_on", "0.1", Sampler(1.0, True)),
        ("parentbased_always_off", None, Sampler(0.0, True)),
        ("parentbased_traceidratio", "1e-1", Sampler(0.1, True)),
        ("ParentBased_TraceIdRatio", "0", Sampler(0.0, True)),
    ],
)
def test_samplers(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str | None,
    argument: str | None,
    sampler: Sampler,
) -> None:
    if name:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", name)
    if argument:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    assert sampler_from_environment() == sampler
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "argument", "sampler", "said"),
    [
        ("jaeger_remote", "x", Sampler(1.0, True), "OTEL_TRACES_SAMPLER='jaeger_remote'"),
        ("traceidratio", "1.5", Sampler(1.0, False), "from 0 to 1"),
        ("traceidratio", "nan", Sampler(1.0, False), "from 0 to 1"),
        ("parentbased_traceidratio", "some", Sampler(1.0, True), "OTEL_TRACES_SAMPLER_ARG='some'"),
    ],
)
def test_what_opentelemetry_does_not_know_is_ignored_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    argument: str,
    sampler: Sampler,
    said: str,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", name)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    with caplog.at_level(logging.WARNING):
        assert sampler_from_environment() == sampler
    assert said in caplog.text
    assert "is ignored" in caplog.text


def test_who_decides_about_a_request() -> None:
    wanted, unwanted = (f"00-{'a' * 16}{low}{'b' * 8}-{'c' * 16}-0" for low in ("00000001", "ffffffff"))
    half = 1 << 31
    for parent, by_id in ((wanted, True), (unwanted, False)):
        for flag in (0, 1):
            headers = {"traceparent": f"{parent}{flag}"}
            assert context.of_request(headers, half).sampled is bool(flag)
            assert context.of_request(headers, half, parent_based=False).sampled is by_id
    shares = [context.of_request(None, half).sampled for _ in range(2000)]
    assert 800 < sum(shares) < 1200


@pytest.mark.parametrize("name", ["always_off", "parentbased_always_off", "always_on"])
def test_the_variable_reaches_processes_and_exporters(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver, name: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", name)
    with attach(endpoint=receiver.endpoint) as session:
        ratio = 1.0 if name == "always_on" else 0.0
        assert session.recorder.sample == round(ratio * 2**32)
        record(session, error="")
        record(session, error="abort")
        record(session, origin=TraceContext(7, 8, True))
        record(session, origin=TraceContext(9, 8, False))
    # The origin is what the aspect found out; here only what the collector does with it is seen.
    assert len(receiver.named("chat m")) == (3 if name == "always_on" else 1)


def received(options: TraceOptions) -> RequestBegin:
    """The aspect's record of a request whose caller has a trace."""
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    request = SimpleNamespace(rid="r", is_chat=False, stream=False, headers=headers, group=None)
    kept = Memory()
    kept.sample = 0
    aspect = CallingObserver(Trackers.of(EMBEDDED, kept, options))
    receive = next(seen for seen in aspect.observations() if seen.role == "receive_request")
    receive.exit(receive.enter((object(), request), {}), object(), None)
    (event,) = kept.events
    assert isinstance(event, RequestBegin)
    return event


def test_the_aspect_applies_the_sampler() -> None:
    for parent_based in (True, False):
        assert received(TraceOptions(parent_based)).sampled is parent_based


def test_a_caller_s_context_is_taken_unless_propagators_say_otherwise() -> None:
    assert received(TraceOptions()).trace_id == int("a" * 32, 16)
    alone = received(TraceOptions(takes_context=False))
    assert alone.trace_id != int("a" * 32, 16)
    assert alone.parent_id == 0


@pytest.mark.parametrize(
    ("value", "takes", "warns"),
    [
        (None, True, False),
        ("", True, False),
        ("tracecontext", True, False),
        ("Baggage, TraceContext", True, False),
        ("none", False, False),
        ("baggage", False, False),
        ("b3,tracecontext", True, True),
        ("b3multi", False, True),
    ],
)
def test_propagators(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: str | None,
    takes: bool,
    warns: bool,
) -> None:
    if value is not None:
        monkeypatch.setenv("OTEL_PROPAGATORS", value)
    assert TraceSettings.from_environment().takes_context is takes
    assert ("OTEL_PROPAGATORS" in caplog.text) is warns
    caplog.clear()
    monkeypatch.setenv("SGL_ASPECTS_TRACE_RUN", "/somewhere")
    assert TraceSettings.from_environment().takes_context is takes
    assert not caplog.text  # the run's first process has logged it


def record(
    session: TraceSession,
    *,
    error: str = "",
    seconds: float = 1.0,
    origin: TraceContext | None = None,
    rid: str = "r",
) -> int:
    """A request that sampling left out unless ``origin`` is sampled, with a child."""
    recorder, start = session.recorder, time.monotonic_ns() - int(seconds * SECOND)
    span_id = recorder.new_id()
    if origin is None:
        origin = context.new(recorder.sample)
    end = start + int(seconds * SECOND)
    recorder.write(RequestBegin(span_id, rid, start, *origin, "chat m", {"gen_ai.request.id": rid}))
    recorder.spans(CHILD)(recorder.new_id(), span_id, span_id, start, end)
    recorder.write(RequestSent(span_id))
    recorder.spans(REQUEST)(span_id, span_id, 0, start, end, (), error)
    return span_id


def test_failed_requests_are_kept_and_the_rest_is_sampled(
    monkeypatch: pytest.MonkeyPatch, receiver: Receiver
) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        record(session, origin=unsampled(), rid="well")
        record(session, origin=unsampled(), rid="failed", error="abort")
        record(session, origin=TraceContext(5, 6, False, "", True), rid="caller-said-no", error="abort")
        record(session, origin=context.new(), rid="sampled")
        run_scheduler(session, ["well", "failed"])
    roots = {span.attributes["gen_ai.request.id"]: span for span in receiver.named("chat m")}
    assert set(roots) == {"failed", "sampled"}
    failed = roots["failed"]
    of_failed = [span for span in receiver.spans if span.trace_id == failed.trace_id]
    assert sorted(span.name for span in of_failed) == ["chat m", "decode", "queue", "tokenize"]
    # Both requests that are left out, with what belongs to them: 4 and 2 spans.
    assert session.close().not_sampled == 6


def test_slow_requests_are_kept(monkeypatch: pytest.MonkeyPatch, receiver: Receiver) -> None:
    monkeypatch.setenv("SGL_ASPECTS_TRACE_KEEP_SLOWER_THAN", "2.5")
    monkeypatch.setenv("SGL_ASPECTS_TRACE_KEEP_FAILED", "off")
    with attach(endpoint=receiver.endpoint) as session:
        record(session, origin=unsampled(), rid="quick", seconds=2.4)
        record(session, origin=unsampled(), rid="failed", seconds=1, error="ValueError")
        record(session, origin=unsampled(), rid="slow", seconds=2.5)
    assert [span.attributes["gen_ai.request.id"] for span in receiver.named("chat m")] == ["slow"]


def test_several_answers_are_kept_with_their_request(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        recorder, now = session.recorder, time.monotonic_ns()
        for rid, error in (("bad", "abort"), ("good", "")):
            origin, root, answer = unsampled(), recorder.new_id(), recorder.new_id()
            recorder.write(RequestBegin(root, rid, now, *origin, "chat m", {}))
            below = TraceContext(origin.trace_id, root, False)
            recorder.write(RequestBegin(answer, f"{rid}-1", now, *below, "chat m", {}))
            recorder.spans(REQUEST)(answer, answer, 0, now, now + 5)
            recorder.spans(REQUEST)(root, root, 0, now, now + 9, (), error)
    outer, inner = sorted(receiver.named("chat m"), key=lambda span: span.kind, reverse=True)
    assert inner.parent_id == outer.span_id
    assert outer.is_error
    assert not inner.is_error


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "_HELD_SPANS", 10)
    joiner = join.Joiner(Resource({}), lambda span: None, tail=TailChoice())
    writer: Any = SimpleNamespace(name="1-1")

    def under_way(request: int, spans: int) -> None:
        left_out = context.TraceContext(request, sampled=False)
        joiner.add(writer, RequestBegin(request, str(request), 1, *left_out, "chat m", {}))
        for number in range(spans):
            span_id = request * 1000 + number + 1
            joiner.add(writer, SpanEnd(SpanType("queue"), span_id, request, request, 1, 2))

    for request in range(1, 101):
        under_way(request, 3)
    assert joiner.not_sampled == 291
    joiner = join.Joiner(Resource({}), lambda span: None, tail=TailChoice())
    under_way(1, 50)
    assert joiner.not_sampled == 0  # one request alone is never given up


@pytest.mark.usefixtures("exports_at_once")
def test_a_collector_that_comes_anew_keeps_whole_traces(tmp_path: Path) -> None:
    """A request that sampling left out fails after a restart: what it had done before is shown, too."""
    file = tmp_path / "traces.jsonl"
    session = attach(file=str(file))
    failing, well = begin(session, "failing", unsampled()), begin(session, "well", unsampled())
    run_scheduler(session, ["failing", "well"])
    begin(session, "seen")()
    wait_until(lambda: file.exists() and '"seen"' in file.read_text())
    kill_collector_for_good(session)
    with started_again(session) as summary:
        request = failing("abort")
        well()
    session.close()
    spans = [*read_file(file)]
    assert below(spans, request) == ["decode", "queue"]
    assert summary["spans_recorded"] >= 3  # spans that the killed ones had not confirmed are sent again
    assert summary["not_sampled"] == 3
