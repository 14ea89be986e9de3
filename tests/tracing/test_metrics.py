"""Metrics: made from the records by the collector, pushed by OTLP and shown to Prometheus."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from sgl_aspects.errors import ConfigError
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.tracing import TraceSession, attach, context
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.records import AttributeValue, RequestBegin, RequestSent
from sgl_aspects.tracing.schema import REQUEST, STEP
from sgl_aspects.tracing.session import attach_from_environment
from sgl_aspects.tracing.settings import TraceSettings
from tests.support.collectors import has_delivered, kill_collector_for_good, started_again
from tests.support.otlp_receiver import Point, Receiver, grpc_receiver, http_receiver
from tests.support.processes import command, free_port, wait_until
from tests.support.sessions import run_scheduler
from tests.support.tiny_models import make_llama

pytestmark = pytest.mark.usefixtures("forked_schedulers", "forked_collectors")

SECOND = 1_000_000_000
COMMON = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "test",
    "gen_ai.request.model": "m",
    "gen_ai.response.model": "m",
}


@pytest.fixture
def port() -> int:
    return free_port()


def page(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def shown(port: int, name: str) -> float | None:
    """The sum of a metric's samples on the page; None where it has none."""
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page(port), re.MULTILINE)
    return sum(map(float, found)) if found else None


def record_request(
    session: TraceSession | SimpleNamespace,
    *,
    seconds: float = 2.0,
    first: float | None = 0.5,
    tokens: int = 4,
    error: str = "",
    sampled: bool = True,
    rid: str = "r",
) -> None:
    recorder, start = session.recorder, time.monotonic_ns()
    span_id = recorder.new_id()
    origin = TraceContext(context.new().trace_id, 7 if not sampled else 0, sampled)
    recorder.write(RequestBegin(span_id, rid, start, *origin, "chat m", dict(COMMON)))
    values = [rid, ["stop"], first, 10, tokens, 6, first, seconds]
    recorder.spans(REQUEST)(span_id, span_id, 0, start, start + int(seconds * SECOND), values, error)


def of(points: list[Point], **attributes: str) -> Point:
    """The one point with these attributes; ``_`` stands for a dot."""
    wanted = {key.replace("__", "."): value for key, value in attributes.items()}
    (point,) = [point for point in points if wanted.items() <= point.attributes.items()]
    return point


def bucket(point: Point, value: float) -> bool:
    """Whether the one value of the histogram is in the bucket that holds ``value``."""
    index = sum(bound < value for bound in point.bounds)
    return point.buckets[index] == point.count == 1


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_requests_become_the_conventional_histograms(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with (grpc_receiver if protocol == "grpc" else http_receiver)() as receiver:
        with attach(endpoint=receiver.endpoint, service_name="server") as session:
            record_request(session, seconds=2.0, first=0.5, tokens=4)
        duration = of(receiver.points("gen_ai.server.request.duration"))
        assert (duration.attributes, duration.count) == (COMMON, 1)
        assert duration.value == pytest.approx(2.0)
        assert bucket(duration, 2.0)
        assert duration.bounds[0] == 0.01
        assert duration.bounds[-1] == 81.92
        first = of(receiver.points("gen_ai.server.time_to_first_token"))
        assert first.attributes == COMMON
        assert first.value == pytest.approx(0.5)
        assert (len(first.bounds), first.bounds[0], first.bounds[-1]) == (16, 0.001, 10.0)
        each = of(receiver.points("gen_ai.server.time_per_output_token"))
        assert each.value == pytest.approx(0.5)  # 1.5 s for the three tokens after the first
        assert (len(each.bounds), each.bounds[0], each.bounds[-1]) == (13, 0.01, 2.5)
        usage = receiver.points("gen_ai.client.token.usage")
        assert of(usage, gen_ai__token__type="input").value == 10
        assert of(usage, gen_ai__token__type="output").value == 4
        assert usage[0].bounds[-1] == 67108864
        tokens = receiver.points("sgl_aspects.tokens")
        assert of(tokens, gen_ai__token__type="output").value == 4
        assert of(receiver.points("sgl_aspects.prefix_cache.hit_tokens")).value == 6
        exported = of(receiver.points("sgl_aspects.spans.exported"), sgl_aspects__exporter="otlp")
        assert exported.value == 1
        (resource,) = {
            pair.value.string_value
            for message in receiver.metric_requests
            for metrics in message.resource_metrics
            for pair in metrics.resource.attributes
            if pair.key == "service.name"
        }
        assert resource == "server"


def test_a_failed_request_has_a_duration_and_no_speed(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        record_request(session, error="abort")
    duration = of(receiver.points("gen_ai.server.request.duration"))
    assert duration.attributes == {**COMMON, "error.type": "abort"}
    assert receiver.points("gen_ai.server.time_to_first_token") == []
    assert receiver.points("gen_ai.server.time_per_output_token") == []


def test_what_is_not_sampled_is_measured(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        record_request(session, sampled=False)
    assert receiver.spans == []
    assert of(receiver.points("gen_ai.server.request.duration")).count == 1


def test_an_answer_in_one_piece_has_its_first_token_from_the_scheduler(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        recorder, start = session.recorder, time.monotonic_ns() - SECOND
        span_id = recorder.new_id()
        recorder.write(RequestBegin(span_id, "r1", start, *context.new(), "chat m", {}))
        recorder.write(RequestSent(span_id))
        run_scheduler(session, ["r1"])
        values = ["r1", ["stop"], None, 1, 3, 0, None, 5.0]
        recorder.spans(REQUEST)(span_id, span_id, 0, start, time.monotonic_ns(), values)
    (decode,), (request,) = receiver.named("decode"), receiver.named("chat m")
    assert of(receiver.points("gen_ai.server.time_to_first_token")).value == pytest.approx(
        (decode.start - request.start) / SECOND
    )


def test_steps_become_gauges_and_a_histogram(receiver: Receiver) -> None:
    with attach(endpoint=receiver.endpoint) as session:
        recorder = session.recorder
        for number, mode in enumerate(("extend", "decode", "decode"), 1):
            span_id = number if number < 3 else 0  # the last one is not traced, but is counted
            values: list[AttributeValue] = [number, mode, 4, 40 if mode == "extend" else 4, 3, 4, 0.25]
            recorder.spans(STEP)(span_id, span_id, 0, 0, SECOND // 50, values)
        # Values from a damaged ring do no harm.
        recorder.spans(STEP)(9, 9, 0, 5, 1, [1, "decode", -4, "x", None, True, 1e300])
    steps = receiver.points("sgl_aspects.step.duration")
    assert of(steps, sgl_aspects__forward__mode="extend").value == pytest.approx(0.02)
    assert of(steps, sgl_aspects__forward__mode="decode").count == 3
    tokens = receiver.points("sgl_aspects.step.tokens")
    assert of(tokens, sgl_aspects__forward__mode="decode").value == 8
    assert len(receiver.named("scheduler.step")) == 3


def test_the_gauges_follow_a_real_engine(tmp_path: Path, port: int) -> None:
    model = tmp_path / "tiny"
    make_llama(model, max_position_embeddings=32768)
    long = SamplingParams(max_new_tokens=15000, ignore_eos=True)
    with (
        attach(level=1, file=str(tmp_path / "traces.jsonl"), prometheus=port),
        Engine(model_path=model, max_total_tokens=20000, max_running_requests=1) as engine,
    ):
        stream = engine.stream("long", long)
        next(stream)
        waits = engine.submit("waits", long)

        def gauges() -> tuple[float | None, ...]:
            names = ("queue_running", "queue_waiting", "batch_size")
            return tuple(shown(port, f"sgl_aspects_{name}") for name in names)

        wait_until(lambda: gauges() == (1, 1, 1))
        assert (shown(port, "sgl_aspects_kv_usage") or 0) > 0
        waits.abort()
        stream.close()  # type: ignore[attr-defined]  # it is a generator
        # Aborted between steps: no step follows, and the gauges show it nonetheless.
        wait_until(lambda: gauges() == (0, 0, 0))
        assert shown(port, "sgl_aspects_kv_usage") == 0
        wait_until(lambda: shown(port, "gen_ai_server_request_duration_seconds_count") == 2)
        assert (shown(port, "sgl_aspects_step_duration_seconds_count") or 0) > 1
        assert 'error_type="abort"' in page(port)
        assert "python_gc" not in page(port)  # of the collector's process, which is not wanted
        os.kill(engine.scheduler_pid, signal.SIGKILL)
        wait_until(lambda: gauges() == (None, None, None))
    assert "scheduler.step" not in (tmp_path / "traces.jsonl").read_text()


@pytest.mark.usefixtures("two_devices")
def test_the_steps_of_two_ranks_are_counted_once(tmp_path: Path, receiver: Receiver) -> None:
    make_llama(tmp_path)
    with (
        attach(level=2, endpoint=receiver.endpoint),
        Engine(model_path=tmp_path, tp_size=2, max_total_tokens=1024) as engine,
    ):
        engine.generate([7] * 20, SamplingParams(max_new_tokens=10, ignore_eos=True))
    steps = receiver.named("scheduler.step")
    assert len(steps) == 20
    assert sum("sgl_aspects.rank.follower" in step.resource for step in steps) == 10
    assert sum(point.value for point in receiver.points("sgl_aspects.step.tokens")) == 20 + 9
    assert sum(point.count for point in receiver.points("sgl_aspects.step.duration")) == 10


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {number} on 127.0.0.1.*--prometheus"):
            attach(file=str(tmp_path / "traces.jsonl"), prometheus=number)
        ran = command("run", "--prometheus", str(number), "--", "true")
    assert ran.returncode != 0
    assert f"port {number}" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_next_run_may_have_the_port_at_once(tmp_path: Path, port: int) -> None:
    for _ in range(4):
        with attach(level=1, file=str(tmp_path / "traces.jsonl"), prometheus=port):
            wait_until(lambda: shown(port, "target_info") == 1)


def test_a_collector_started_again_counts_everything_once(
    receiver: Receiver, port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", str(port))
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus")
    with attach(file=str(tmp_path / "traces.jsonl")) as session:
        recorder = session.recorder
        record_request(session)
        recorder.spans(STEP)(5, 5, 0, 0, SECOND, [1, "decode", 4, 4, 3, 2, 0.5])
        wait_until(lambda: shown(port, "sgl_aspects_step_duration_seconds_count") == 1)
        wait_until(lambda: shown(port, "gen_ai_server_request_duration_seconds_count") == 1)
        wait_until(lambda: has_delivered(session))
        kill_collector_for_good(session)
        wait_until(lambda: page(port) == "")
        record_request(session, tokens=2)
        with started_again(session):
            # The gauges are known again from what is in the ring; what was counted is not counted again.
            wait_until(lambda: shown(port, "sgl_aspects_queue_running") == 2)
            wait_until(lambda: shown(port, "gen_ai_server_request_duration_seconds_count") == 1)
            assert shown(port, "sgl_aspects_tokens_total") == 12
            assert shown(port, "sgl_aspects_step_duration_seconds_count") in (None, 0)


def test_drops_are_counted_once_over_restarts(tmp_path: Path) -> None:
    from opentelemetry.sdk.resources import Resource

    from sgl_aspects.tracing.collect.reported_metrics import CollectorMetrics

    class Reader:
        dropped, lock, open = 0, threading.Lock(), list

    def counted(reader: Reader) -> float:
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        memory = InMemoryMetricReader()
        metrics = CollectorMetrics(str(tmp_path), [memory], Resource({}))
        metrics.watch(reader, list, [])  # type: ignore[arg-type]
        values = []
        for further in (5, 0):
            reader.dropped += further
            data = memory.get_metrics_data()
            assert data is not None
            values += [
                float(getattr(point, "value"))  # noqa: B009 (one of several kinds of points)
                for metric in data.resource_metrics[0].scope_metrics[0].metrics
                if metric.name == "sgl_aspects.records.dropped"
                for point in metric.data.data_points
            ]
        metrics.close(1.0)
        return values[-1]

    reader = Reader()
    assert counted(reader) == 5
    reader.dropped += 2  # while no collector lived
    assert counted(reader) == 7  # 2 and 5 more, not 12
    (tmp_path / "metrics.json").write_text("damaged")
    assert counted(reader) == reader.dropped


def test_the_application_s_own_provider_gets_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from sgl_aspects.tracing.sdk import SdkRecorder

    memory = InMemoryMetricReader()
    provider = MeterProvider([memory])
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    recorder = SdkRecorder(3)
    session = SimpleNamespace(recorder=recorder)
    record_request(session)
    record_request(session, error="abort")
    recorder.spans(STEP)(5, 5, 0, 0, SECOND, [1, "decode", 4, 4, 3, 2, 0.5])
    recorder.spans(STEP)(0, 0, 0, 5, 5, [None, None, 0, None, 0, 0, 0.0])
    data = memory.get_metrics_data()
    assert data is not None
    found = {metric.name: metric for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    durations = found["gen_ai.server.request.duration"].data.data_points
    assert sorted(str(dict(point.attributes or {}).get("error.type")) for point in durations) == [
        "None",
        "abort",
    ]
    assert [getattr(point, "count") for point in found["sgl_aspects.step.duration"].data.data_points] == [1]  # noqa: B009
    (running,) = found["sgl_aspects.queue.running"].data.data_points
    assert getattr(running, "value") == 0  # noqa: B009
    provider.shutdown()


def test_choices_of_metric_exporters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def chosen() -> tuple[str, ...]:
        return TraceSettings.from_environment().metric_exporters

    monkeypatch.setenv("SGL_ASPECTS_TRACE", "on")
    assert chosen() == ("otlp",)
    monkeypatch.setenv("SGL_ASPECTS_TRACE_FILE", str(tmp_path / "traces.jsonl"))
    assert chosen() == ()
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus,console")
    assert chosen() == ("prometheus", "console")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    assert chosen() == ()
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "statsd")
    with pytest.raises(ConfigError, match="otlp, prometheus, console"):
        chosen()


def test_without_metrics_untraced_steps_leave_nothing(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    make_llama(model, max_position_embeddings=1024)
    found: list[int] = []
    for metrics in ("none", "console"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OTEL_METRICS_EXPORTER", metrics)
            patch.setenv("SGL_ASPECTS_TRACE_KEEP", "1")
            with (
                attach(level=1, file=str(tmp_path / "traces.jsonl")) as session,
                Engine(model_path=model, max_total_tokens=256) as engine,
            ):
                engine.generate("hello", SamplingParams(max_new_tokens=9, ignore_eos=True))
        found.append(steps_in(session.run_folder))
    assert found[0] == 0
    assert found[1] == 10  # nine steps, and then idle


def steps_in(folder: str) -> int:
    import shutil

    from sgl_aspects.tracing.collect.reader import RingReader
    from sgl_aspects.tracing.records import SpanEnd

    count = 0
    for path in Path(folder).glob("*.ring"):
        ring = RingReader(path, read_only=True)
        ring.skip_to_newest()
        records: Callable[[], Iterator[object]] = ring.history
        count += sum(isinstance(record, SpanEnd) and record.type.name == STEP.name for record in records())
        ring.close()
    shutil.rmtree(folder)
    return count


def test_metrics_without_traces(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("SGL_ASPECTS_TRACE", "1")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus")
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", str(port))
    session = attach_from_environment()
    assert session is not None
    record_request(session)
    wait_until(lambda: shown(port, "gen_ai_server_request_duration_seconds_count") == 1)
    summary = session.close()
    assert summary.problem == ""
    assert summary.exported == {}
