"""A backend that is down, then slow, then well: bounded memory, counted losses, and it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter, SpanExportResult

from sgl_aspects.tracing import attach
from sgl_aspects.tracing.collect.run_reader import Deliveries
from sgl_aspects.tracing.export.otlp_encoder import SpanEncoder
from sgl_aspects.tracing.export.pipelines import Pipeline, close_all
from tests.support.distributions import install
from tests.support.otlp_receiver import Receiver, backend, grpc_receiver, http_receiver, spans_of
from tests.support.processes import peak_megabytes, wait_until
from tests.support.sessions import begin, collected

pytestmark = pytest.mark.usefixtures("forked_collectors")


def test_a_process_that_waits_for_the_end_logs_why(capfd: pytest.CaptureFixture[str]) -> None:
    class Hanging(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            time.sleep(2.0)
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            """Nothing to end."""

    pipeline = Pipeline("slow", Hanging())
    pipeline.offer([collected(2)])
    close_all([pipeline], 5)
    said = capfd.readouterr().err
    assert "slow: sending the last spans takes long; given up when none is delivered for 5 s" in said
    assert pipeline.exported == 1


EXPORTER = """
import sys, time
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
class Exporter(SpanExporter):
    def __init__(self): {init}
    def export(self, spans): {export}
    def shutdown(self): {shutdown}
"""
DELIVERS = "return SpanExportResult.SUCCESS"


@pytest.mark.parametrize(
    ("init", "export", "shutdown", "delivered", "part"),
    [
        ("sys.exit(3)", DELIVERS, "pass", 0, "SystemExit: 3; the other exporters go on"),
        (
            "1 / 0",
            DELIVERS,
            "pass",
            0,
            "(theirs:Exporter of theirs) cannot be made: ZeroDivisionError: division",
        ),
        ("pass", "raise GeneratorExit", "pass", 0, "The exporter theirs failed: GeneratorExit"),
        ("pass", "return None", "pass", 0, "NOT delivered"),
        ("pass", DELIVERS, "1 / 0", 1, "theirs failed as it was shut down: ZeroDivisionError"),
    ],
)
def test_a_package_s_exporter_that_fails_costs_the_others_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    init: str,
    export: str,
    shutdown: str,
    delivered: int,
    part: str,
) -> None:
    (tmp_path / "theirs.py").write_text(EXPORTER.format(init=init, export=export, shutdown=shutdown))
    install(tmp_path, "theirs", "[opentelemetry_traces_exporter]\ntheirs=theirs:Exporter\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with attach(exporters=["otlp-json-file", "theirs"], file=str(tmp_path / "spans")) as session:
        begin(session, "r1")()
    said = capfd.readouterr().err
    assert session.close().exported == {"otlp-json-file": 1, "theirs": delivered}
    assert part in said
    assert "Traceback" not in said


def test_a_slow_exporter_is_waited_for_as_long_as_it_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            time.sleep(0.4)
            return SpanExportResult.SUCCESS

    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    pipeline = Pipeline("slow", Slow())
    for number in range(5):
        pipeline.offer([collected(number + 2)])
    close_all([pipeline], 0.9)
    assert (pipeline.exported, pipeline.not_delivered) == (5, 0)


def test_records_may_be_overwritten_once_each_exporter_has_their_spans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = threading.Event()

    class Held(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            return SpanExportResult.SUCCESS if opened.wait(60) else SpanExportResult.FAILURE

    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    exporters = ConsoleSpanExporter(out=StringIO()), Held()
    pipelines = [Pipeline(type(each).__name__, each) for each in exporters]
    deliveries = Deliveries(pipelines)
    for number in (1, 2):
        for pipeline in pipelines:
            pipeline.offer([collected(number + 1)])
        deliveries.pass_ended({"ring": number})
    wait_until(lambda: pipelines[0].done == 2)
    deliveries.pass_ended({"ring": 3})
    assert deliveries.positions == {}
    opened.set()
    wait_until(lambda: pipelines[1].done == 2)
    deliveries.pass_ended({"ring": 4})
    assert deliveries.positions == {"ring": 3}
    close_all(pipelines, 5)


def test_spans_with_many_links_are_sent_in_smaller_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, gRPC's servers refuse a message of more than 4 MiB: 2,048 steps of 256 requests are 23."""
    sizes: list[int] = []
    encoder = SpanEncoder()

    class Sending(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            sizes.append(len(encoder.message(spans)))
            return SpanExportResult.SUCCESS

    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    pipeline = Pipeline("sending", Sending(), prepare=encoder.span)
    step = collected(2)._replace(links=[collected(3 + number).root for number in range(256)])
    pipeline.offer([step] * 2048)
    close_all([pipeline], 30)
    assert pipeline.exported == 2048
    assert max(sizes) < 1 << 20


def test_a_span_that_cannot_be_encoded_is_lost_alone(caplog: pytest.LogCaptureFixture) -> None:
    delivered: list[Any] = []

    class Keeping(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            delivered.extend(spans)
            return SpanExportResult.SUCCESS

    pipeline = Pipeline("otlp", Keeping(), prepare=SpanEncoder().span)
    spans = [collected(number + 2) for number in range(3)]
    spans[1] = spans[1]._replace(name="odd", start_ns=-1)
    pipeline.offer(spans)
    close_all([pipeline], 30)
    assert (len(delivered), pipeline.exported, pipeline.lost) == (2, 2, 1)
    assert "The span odd is lost to the exporter otlp" in caplog.text


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (404, "Failed to export spans: {}/v1/traces answers 404 Not Found"),
        (429, "{}/v1/traces answers 429 Too Many Requests, Retry-After: 3600"),
    ],
)
def test_a_refusal_is_told_with_its_address_and_when_to_try_again(
    status: int, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Retry-After", "3600")
        handler.end_headers()

    with http_receiver(answer) as running, attach(endpoint=running.endpoint) as session:
        begin(session, "r")()
    assert session.close().not_delivered == {"otlp": 1}
    assert told.format(running.endpoint) in capfd.readouterr().err


@pytest.mark.parametrize(
    ("receiver", "protocol", "other"),
    [(http_receiver, "grpc", "http/protobuf"), (grpc_receiver, "http/protobuf", "grpc")],
)
def test_a_backend_of_the_other_protocol_is_told(
    receiver: Callable[[], AbstractContextManager[Receiver]],
    protocol: str,
    other: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("SGL_ASPECTS_TRACE_FLUSH_SECONDS", "2")
    with receiver() as running, attach(endpoint=running.endpoint) as session:
        begin(session, "r")()
    assert f"or set OTEL_EXPORTER_OTLP_PROTOCOL={other}" in capfd.readouterr().err


def test_down_slow_and_back_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = ["down"]
    tried = threading.Event()
    got: set[str] = set()

    def answer(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        tried.set()
        if mode[0] == "slow":
            time.sleep(0.3)
        down = mode[0] == "down"
        if not down and handler.path == "/v1/traces":
            message = ExportTraceServiceRequest.FromString(body)
            got.update(str(span.attributes["gen_ai.request.id"]) for span in spans_of(message))
        handler.send_response(503 if down else 200)
        handler.end_headers()

    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "1024")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    with backend(answer) as endpoint:
        with attach(endpoint=endpoint) as session:
            begin(session, "first")()
            assert tried.wait(60)
            before = peak_megabytes(session.collector_process_id)
            for number in range(8000):
                begin(session, f"down-{number}")()
            time.sleep(1.5)
            assert peak_megabytes(session.collector_process_id) - before < 60
            mode[0] = "slow"
            for number in range(100):
                begin(session, f"slow-{number}")()
            mode[0] = "well"
            deadline = time.monotonic() + 60
            number = 0
            while not any(rid.startswith("well") for rid in tuple(got)):
                assert time.monotonic() < deadline, "nothing arrives although the backend is back"
                begin(session, f"well-{number}")()
                number += 1
                time.sleep(0.02)
        recorded = 1 + 8000 + 100 + number
        summary = session.close()
        assert summary.spans_recorded + summary.dropped // 3 == pytest.approx(recorded, abs=summary.dropped)
        assert summary.exported["otlp"] == len(got) > 0
        assert summary.not_delivered["otlp"] > 0
        assert summary.exported["otlp"] + summary.not_delivered["otlp"] == summary.spans_recorded
