"""Runs against real OTLP backends that answer in every way a backend may."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import grpc  # type: ignore[import-untyped]
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing import TraceSummary, attach
from sgl_aspects.tracing.export import otlp
from sgl_aspects.tracing.export.otlp_encoder import SpanEncoder
from tests.support.distributions import install
from tests.support.otlp_receiver import Receiver, Span, grpc_receiver, http_receiver
from tests.support.processes import peak_megabytes
from tests.support.sessions import begin
from tests.support.tls_files import make_certificate

pytestmark = pytest.mark.usefixtures("forked_collectors")

PARTIAL = ExportTraceServiceResponse(
    partial_success=ExportTracePartialSuccess(rejected_spans=2, error_message="too old")
)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")


def reply(status: int, body: bytes = b"", **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def run_of_three(endpoint: str | None = None) -> TraceSummary:
    with attach(level=1, endpoint=endpoint) as session:
        for number in range(3):
            begin(session, f"r{number}")()
    return session.close()


def test_a_redirect_is_not_a_delivery(capfd: pytest.CaptureFixture[str]) -> None:
    with http_receiver(reply(308, Location="http://elsewhere:4318/v1/traces?api-key=hush")) as running:
        summary = run_of_three(running.endpoint)
    assert (summary.exported["otlp"], summary.not_delivered["otlp"]) == (0, 3)
    said = capfd.readouterr().err
    assert "308, set http://elsewhere:4318/v1/traces?*** as the endpoint" in said


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_what_a_backend_rejects_is_not_delivered(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], protocol: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    if protocol == "grpc":
        receiver = grpc_receiver(PARTIAL)
    else:
        receiver = http_receiver(reply(200, PARTIAL.SerializeToString()))
    with receiver as running:
        summary = run_of_three(running.endpoint)
    assert (summary.exported["otlp"], summary.not_delivered["otlp"]) == (1, 2)
    assert "the backend rejected 2 spans: too old" in capfd.readouterr().err


@pytest.mark.parametrize(
    "answer",
    [
        reply(200, b"not protobuf at all"),
        reply(200, b'{"partialSuccess":{}}', Content_Type="application/json"),
        reply(200, b"cut short", Content_Length="100"),
        reply(202),
    ],
)
def test_any_body_of_a_success_is_a_success(answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
    with http_receiver(answer) as running:
        assert run_of_three(running.endpoint).exported == {"otlp": 3}
    assert len(running.spans) == 3


def test_an_answer_of_any_length_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(200 << 20))
        handler.end_headers()
        try:
            for _ in range(200):
                handler.wfile.write(bytes(1 << 20))
        finally:
            answered.set()

    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with http_receiver(endless) as running, attach(level=1, endpoint=running.endpoint) as session:
        begin(session, "one")()
        assert answered.wait(60)
        begin(session, "two")()
        deadline = time.monotonic() + 60
        while len(running.spans) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert peak_megabytes(session.collector_process_id) < 150
    assert session.close().exported == {"otlp": 2}


def test_an_answer_that_trickles_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_ANSWER_SECONDS", 0.1)
    gone = threading.Event()

    def trickle(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        try:
            for _ in range(6000):
                handler.wfile.write(b"x")
                time.sleep(0.01)
        finally:
            gone.set()

    rejections = otlp.Rejections("TRACES")
    with http_receiver(trickle) as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.endpoint)
        exporter = otlp.span_exporter("http/protobuf", rejections, SpanEncoder())
        exporter.export([])
        assert gone.wait(30)  # before all of it was sent, a minute later
        exporter.shutdown()
    assert rejections.take() == 0


@pytest.mark.parametrize("value", ["none", "gzip", "", " GZIP "])
@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_COMPRESSION", "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION"])
def test_grpc_takes_every_word_for_compression(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setenv(name, value)
    with grpc_receiver() as running:
        assert run_of_three(running.endpoint).exported == {"otlp": 3}
    assert len(running.spans) == 3


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_certificates_of_both_sides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, protocol: str) -> None:
    theirs, their_key = make_certificate(tmp_path, "backend")
    ours, our_key = make_certificate(tmp_path, "collector")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", theirs)  # the others are for every signal
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", ours)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", our_key)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", ours)  # which trusts another
    if protocol == "grpc":
        pair = [(Path(their_key).read_bytes(), Path(theirs).read_bytes())]
        client = Path(ours).read_bytes()
        credentials = grpc.ssl_server_credentials(pair, client, require_client_auth=True)
        receiver = grpc_receiver(credentials=credentials)
    else:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(theirs, their_key)
        tls.load_verify_locations(ours)
        tls.verify_mode = ssl.CERT_REQUIRED
        receiver = http_receiver(tls=tls)
    with receiver as running:
        assert run_of_three(running.endpoint).exported == {"otlp": 3}
    assert len(running.spans) == 3


def received(receiver: Receiver) -> Span:
    assert run_of_three(receiver.endpoint).exported == {"otlp": 3}
    return receiver.spans[0]


def test_limits_of_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "1")
    with http_receiver() as receiver:
        assert len(received(receiver).attributes) == 1
        (raw, *_) = receiver.requests[0].resource_spans[0].scope_spans[0].spans
        assert raw.dropped_attributes_count == 1
    monkeypatch.delenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "1")
    with http_receiver() as receiver:
        assert received(receiver).attributes == {"gen_ai.request.id": "r", "gen_ai.usage.output_tokens": 3}


def test_the_resource_is_the_engine_s_and_can_be_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPERIMENTAL_RESOURCE_DETECTORS", "process,host")
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES", "a=b%20c,nonsense,process.owner=me,x=\udcff,service.name=one"
    )
    with http_receiver() as receiver:
        resource = received(receiver).resource
    assert resource["process.pid"] == os.getpid()
    assert resource["process.owner"] == "me"
    assert resource["service.name"] == "one"
    assert resource["a"] == "b c"
    assert resource["x"] == "?"
    assert {name for name in resource if name.startswith("process.") and "runtime" not in name} == {
        "process.pid",
        "process.owner",
    }
    assert "host.name" in resource
    monkeypatch.setenv("OTEL_SERVICE_NAME", "two")
    with http_receiver() as receiver:
        assert received(receiver).resource["service.name"] == "two"


def test_a_collector_that_is_terminated_before_it_has_begun() -> None:
    with http_receiver() as receiver:
        with attach(level=1, endpoint=receiver.endpoint) as session:
            assert session.collector_process_id is not None
            os.kill(session.collector_process_id, signal.SIGTERM)
            for number in range(3):
                begin(session, f"r{number}")()
        assert session.close().problem == ""
        assert session.close().exported == {"otlp": 3}
        assert len(receiver.spans) == 3


def test_a_backend_that_hangs_costs_other_metric_exporters_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp,console")
    monkeypatch.setenv("SGL_ASPECTS_TRACE_FLUSH_SECONDS", "0")
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        summary = run_of_three(f"http://127.0.0.1:{hanging.getsockname()[1]}")
    assert summary.not_delivered == {"otlp": 3}
    said = capfd.readouterr()
    assert "gen_ai.server.request.duration" in said.out
    assert "Traceback" not in said.err
    assert "Callback failed" not in said.err


FULL = """
from sgl_aspects.tracing import attach
from tests.support.sessions import begin
with attach(level=1, endpoint="http://127.0.0.1:9") as session:
    begin(session, "r")()
print(session.summary)
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
def test_an_engine_s_log_that_is_full_costs_no_spans() -> None:
    with open("/dev/full", "w") as log:
        ran = subprocess.run(
            [sys.executable, "-c", FULL],
            env={**os.environ, "SGL_ASPECTS_TRACE_FLUSH_SECONDS": "0"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            timeout=60,
        )
    assert ran.stdout.strip() == "1 span recorded; otlp: 0 delivered, 1 NOT delivered"


REGISTERED = """
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, InMemoryMetricReader
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

class Spans(SpanExporter):
    def export(self, spans):
        print("exported", [span.name for span in spans], flush=True)
        return SpanExportResult.SUCCESS

class Reader(InMemoryMetricReader):
    def shutdown(self, timeout_millis=30000, **kwargs):
        print("reader down", flush=True)
"""


def test_an_exporter_that_a_package_registers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tmp_path.joinpath("vendor_exporter.py").write_text(REGISTERED)
    install(
        tmp_path,
        "vendor-exporter",
        "[opentelemetry_traces_exporter]\nVendor=vendor_exporter:Spans\n"
        "[opentelemetry_metrics_exporter]\nreader=vendor_exporter:Reader\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "Vendor")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "reader")
    assert run_of_three().exported == {"Vendor": 3}
    said = capfd.readouterr().out
    assert "exported ['chat m', 'chat m', 'chat m']" in said
    assert "reader down" in said
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "missing")
    with pytest.raises(ConfigError, match="opentelemetry_traces_exporter"):
        attach()
