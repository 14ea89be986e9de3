"""OpenTelemetry's own variables: errors come before anything starts, and show no secret."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing import attach
from sgl_aspects.tracing.export.failures import FirstFailure
from sgl_aspects.tracing.session import attach_from_environment
from sgl_aspects.tracing.settings import TraceSettings
from sgl_aspects.tracing.variables import SpanLimits, normalise, secrets, unreachable, without_secrets
from tests.support.processes import command, output_of, python
from tests.support.tls_files import make_certificate

SECRET = "sk-live-4711"


@pytest.fixture(autouse=True)
def _traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_ASPECTS_TRACE", "on")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_BSP_SCHEDULE_DELAY", "0"),
        ("OTEL_BSP_SCHEDULE_DELAY", "soon"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "-1"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000"),
        ("OTEL_BSP_EXPORT_TIMEOUT", "x"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "often"),
        ("OTEL_METRIC_EXPORT_TIMEOUT", "-5"),
        ("OTEL_METRICS_EXEMPLAR_FILTER", "some"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "both"),
        ("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "none"),
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "many"),
        ("OTEL_SPAN_LINK_COUNT_LIMIT", "-1"),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "1.5"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "ten"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "nan"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli"),
        ("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "zip"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/no/where.pem"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", __file__),
        ("OTEL_EXPORTER_OTLP_METRICS_CLIENT_CERTIFICATE", "/no/where.pem"),
    ],
)
def test_a_value_that_cannot_work_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name) as raised:
        attach_from_environment()
    assert value in str(raised.value)
    assert "ASPECTS_TRACE_RUN" not in os.environ


@pytest.mark.parametrize(
    ("endpoint", "protocol", "said"),
    [
        ("localhost:4318", "http/protobuf", "http://localhost:4318"),
        ("ftp://host", "http/protobuf", "http://localhost:4318"),
        ("http://", "http/protobuf", "host and port"),
        ("http://:4318", "grpc", "host and port"),
        ("http://localhost:99999", "http/protobuf", "host and port"),
        ("http://local host:4318", "http/protobuf", "host and port"),
        (f"http://me:{SECRET}@localhost:4317", "grpc", "OTEL_EXPORTER_OTLP_HEADERS"),
        (f"http://me:{SECRET}@localhost:x", "http/protobuf", r"\*\*\*@localhost:x"),
    ],
)
@pytest.mark.parametrize("signal", ["TRACES_", "METRICS_", ""])
def test_an_endpoint_that_none_can_reach(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, protocol: str, said: str, signal: str
) -> None:
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal}ENDPOINT", endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with pytest.raises(ConfigError, match=said) as raised:
        TraceSettings.from_environment()
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "endpoint", ["HTTP://localhost", " http://localhost:4318/ ", "https://[::1]:4318/otlp"]
)
def test_endpoints_that_are_right(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    assert TraceSettings.from_environment().endpoint == endpoint.strip()


@pytest.mark.parametrize("endpoint", ["unix:///nowhere", "unix:/nowhere", "dns:///nowhere:4317"])
def test_an_address_that_only_grpc_can_open_is_not_called_unreachable(endpoint: str) -> None:
    assert unreachable(endpoint) is None


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        (f"Authorization Bearer {SECRET}", "part 1 of 1"),
        (f"a=b,{SECRET}", "part 2 of 2"),
        (f"authorization={SECRET};x", "authorization.*%3B"),
        (f'authorization="{SECRET}"', "authorization.*%22"),
        (f"authorization={SECRET}%0Ax: y", "authorization.*one line"),
        (f"authorization={SECRET}%E2%82%AC", "authorization.*ASCII"),
    ],
)
@pytest.mark.parametrize("signal", ["TRACES_", "METRICS_", ""])
def test_invalid_headers_are_reported_without_their_values(
    monkeypatch: pytest.MonkeyPatch, headers: str, said: str, signal: str
) -> None:
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{signal}HEADERS", headers)
    with pytest.raises(ConfigError, match=said) as raised:
        TraceSettings.from_environment()
    assert f"OTEL_EXPORTER_OTLP_{signal}HEADERS" in str(raised.value)
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize("headers", ["", " a=b , c = d%2Ce ,", "authorization=Bearer x==", "a="])
def test_headers_that_can(monkeypatch: pytest.MonkeyPatch, headers: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    TraceSettings.from_environment()


def test_a_key_needs_its_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "one")
    _, other = make_certificate(tmp_path, "two")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", key)
    with pytest.raises(ConfigError, match="set OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"):
        TraceSettings.from_environment()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", certificate)
    TraceSettings.from_environment()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY", other)
    with pytest.raises(ConfigError, match=r"OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE.*with its key"):
        TraceSettings.from_environment()


def test_milliseconds_are_taken_for_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "10000")
    TraceSettings.from_environment()
    (said,) = caplog.messages
    assert (
        said
        == "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT=10000: OpenTelemetry for Python takes it for seconds, 2.8 hours"
    )


def test_gzip_is_all_that_grpc_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "deflate")
    TraceSettings.from_environment()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="none, gzip"):
        TraceSettings.from_environment()


@pytest.mark.parametrize(
    "values", [{"OTEL_SDK_DISABLED": "TRUE"}, {"SGL_ASPECTS_RECORDER": "off"}, {"SGL_ASPECTS_TRACE": "off"}]
)
def test_what_is_turned_off_complains_of_nothing(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str]
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "0")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "nowhere")
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert attach_from_environment() is None
    if "SGL_ASPECTS_TRACE" not in values:
        attach().close()


def test_exporters_are_named_once_and_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "OTLP, console,otlp")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "Console,console")
    settings = TraceSettings.from_environment()
    assert settings.exporters == ("otlp", "console")
    assert settings.metric_exporters == ("console",)


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "TRACES_EXPORTER",
        "METRICS_EXPORTER",
        "TRACES_SAMPLER",
        "EXPORTER_OTLP_PROTOCOL",
        "BSP_MAX_QUEUE_SIZE",
    ):
        monkeypatch.setenv(f"OTEL_{name}", "")
    assert TraceSettings.from_environment() == TraceSettings(level=3, metric_exporters=("otlp",))
    variables = {"OTEL_A": " ", "OTEL_B": " b ", "OTHER": "", "OTEL_METRICS_EXEMPLAR_FILTER": "ALWAYS_OFF"}
    variables |= {"OTEL_PYTHON_METER_PROVIDER": "the application's"}
    normalise(variables)
    assert variables == {"OTEL_B": "b", "OTHER": "", "OTEL_METRICS_EXEMPLAR_FILTER": "always_off"}


def test_limits_of_spans_before_those_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SpanLimits.from_environment() == SpanLimits(None, None, None)
    monkeypatch.setenv("OTEL_ATTRIBUTE_COUNT_LIMIT", "9")
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "8")
    assert SpanLimits.from_environment() == SpanLimits(9, 8, None)
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "0")
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "3")
    assert SpanLimits.from_environment() == SpanLimits(0, 8, 3)


def test_an_endpoint_of_the_command_line_goes_before_the_environment_s() -> None:
    show = "import os; print([os.environ.get(f'OTEL_EXPORTER_OTLP_{s}ENDPOINT') for s in ('', 'TRACES_')])"
    words = ["--level", "off", "--endpoint", "http://given:1", "--", sys.executable, "-c", show]
    ran = command("run", *words, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://other:1")
    assert output_of(ran).strip() == "['http://given:1', None]"


@pytest.mark.parametrize("name", ["OTEL_BSP_SCHEDULE_DELAY", "OTEL_SPAN_LINK_COUNT_LIMIT"])
def test_the_command_line_reports_it_in_one_line(name: str) -> None:
    ran = command("run", "--", "true", **{name: "nonsense"})
    assert ran.returncode != 0
    assert len(ran.stderr.splitlines()) == 1
    assert name in ran.stderr


def test_an_engine_with_a_wrong_setting_runs_untraced_with_a_warning() -> None:
    program = "import sgl_aspects; sgl_aspects.load_plugins(); print('serving')"
    ran = python("-c", program, SGL_ASPECTS_TRACE="on", OTEL_BSP_SCHEDULE_DELAY="soon")
    assert output_of(ran).strip() == "serving"
    (line,) = ran.stderr.splitlines()
    assert "OTEL_BSP_SCHEDULE_DELAY='soon'" in line


def test_no_secret_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Bearer%20{SECRET},x=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_HEADERS", "api-key=another%2Fsecret")
    handler = FirstFailure()
    say: Callable[[str], None] = lambda text: handler.emit(  # noqa: E731
        logging.LogRecord("opentelemetry.x", logging.ERROR, "", 0, text, (), None)
    )
    say(f"metadata was invalid: [('authorization', 'Bearer {SECRET}')]")
    say(f"token {SECRET} of http://me:password@host/v1/traces?api-key=hush refused, see another/secret")
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 2
    for secret in (SECRET, "password", "hush", "another/secret"):
        assert secret not in said
    assert "http://***@host/v1/traces?***" in said
    assert without_secrets("spans 1 of 2", secrets()) == "spans 1 of 2"


_MISMATCH = (
    'SSLError(SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: '
    "Hostname mismatch, certificate is not valid for 'host'. (_ssl.c:1006)\"))"
)
_UNKNOWN_CA = _MISMATCH.replace("Hostname mismatch, certificate is not valid for 'host'", "{}")
_NO_PROXY = (
    "ProxyError('Unable to connect to proxy', NewConnectionError(\"HTTPConnection(host='there', port=1): "
    'Failed to establish a new connection: [Errno 111] Connection refused"))'
)


@pytest.mark.parametrize(
    ("scheme", "cause", "told"),
    [
        ("HTTPS", _MISMATCH, "cannot be reached: Hostname mismatch, certificate is not valid for 'host' ("),
        (
            "HTTPS",
            _UNKNOWN_CA.format("unable to get local issuer certificate"),
            "unable to get local issuer certificate; name the CA's file in OTEL_EXPORTER_OTLP_CERTIFICATE (",
        ),
        (
            "HTTPS",
            _UNKNOWN_CA.format("self-signed certificate"),
            "self-signed certificate; name the CA's file in OTEL_EXPORTER_OTLP_CERTIFICATE (",
        ),
        ("HTTP", _NO_PROXY, "the proxy there:1 cannot be reached: Connection refused ("),
        ("HTTPS", _NO_PROXY, "there:1 cannot be reached through the proxy: Connection refused ("),
        (
            "HTTPS",
            "SSLError(1, '[SSL] wrong version number (_ssl.c:1006)')",
            "write http:// instead of https",
        ),
    ],
)
def test_a_failure_is_told_in_the_words_of_its_reason(
    scheme: str, cause: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        f"{scheme}ConnectionPool(host='there', port=1): Max retries exceeded with url: / (Caused by {cause})"
    )
    FirstFailure().emit(logging.makeLogRecord({"name": "opentelemetry.x", "msg": text}))
    assert told in capsys.readouterr().err


def test_a_certificate_that_grpc_does_not_trust_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "Failed to export traces to there:1, error code: StatusCode.UNAVAILABLE, error details: failed to "
        "connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed "
        "(TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal:"
        "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate: OK"
    )
    FirstFailure().emit(logging.makeLogRecord({"name": "opentelemetry.x", "msg": text}))
    told = "there:1 cannot be reached: unable to get local issuer certificate; name the CA's file in OTEL_"
    assert told in capsys.readouterr().err


def test_each_kind_of_failure_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    handler = FirstFailure()
    for number in range(50):
        for text in (f"503, again in {number}.{number} s", "401, go away"):
            handler.emit(logging.LogRecord("opentelemetry.x", logging.ERROR, "", 0, text, (), None))
    try:
        raise ValueError("the reason")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
        handler.emit(logging.LogRecord("opentelemetry.x", logging.ERROR, "", 0, "it failed", (), info))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "again in 0.0" in lines[0]
    assert "go away" in lines[1]
    assert "it failed ValueError: the reason" in lines[2]
    for number in range(50):
        text = "changing " + "x" * number
        handler.emit(logging.LogRecord("opentelemetry.x", logging.ERROR, "", 0, text, (), None))
    assert len(capsys.readouterr().err.splitlines()) == 2
