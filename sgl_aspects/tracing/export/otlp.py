"""OpenTelemetry's OTLP exporters, with the checks of a backend's answer that they lack.

A backend may accept a message but reject a part of it, or redirect the exporter: the exporters call both a
success. Here rejected parts are counted and a redirect is a failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace.export import SpanExporter

from sgl_aspects import env
from sgl_aspects.tracing.export.otlp_encoder import EncodedSpan, SpanEncoder
from sgl_aspects.tracing.variables import compression, tls_files

if TYPE_CHECKING:
    import requests

logger = logging.getLogger(__name__)

# An answer is a few bytes; more than this, or a slow one, is not read.
_LONGEST_ANSWER = 4096
_ANSWER_SECONDS = 2.0
_TRIED_AGAIN = (408, 429)
_PROVIDER = "OTEL_PYTHON_EXPORTER_OTLP_{}CREDENTIAL_PROVIDER"


class Rejections:
    """Counts the parts that a backend rejected of messages it accepted. ``signal``: TRACES or METRICS."""

    def __init__(self, signal: str) -> None:
        self._is_of_spans = signal == "TRACES"
        self._count = 0

    def take(self) -> int:
        """Return the count since the last call."""
        count, self._count = self._count, 0
        return count

    def read(self, answer: bytes) -> None:
        """Read the answer to a message; one that is not protobuf is ignored."""
        message: Any = ExportTraceServiceResponse() if self._is_of_spans else ExportMetricsServiceResponse()
        try:
            message.ParseFromString(answer)
        except DecodeError:
            return
        self.add(message)

    def add(self, message: Any) -> None:
        """Count the rejected parts in an ``Export…ServiceResponse``."""
        partial = message.partial_success
        count = partial.rejected_spans if self._is_of_spans else partial.rejected_data_points
        self._count += max(0, count)
        if count > 0 or partial.error_message:
            what = "spans" if self._is_of_spans else "data points"
            logger.warning(
                "the backend rejected %d %s: %s", count, what, partial.error_message or "no reason"
            )


def span_exporter(protocol: str, rejections: Rejections, encoder: SpanEncoder) -> SpanExporter:
    """Return an exporter of spans that ``encoder`` has encoded; it reads its settings in the environment."""
    exporter: SpanExporter
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as by_grpc

        exporter = by_grpc.OTLPSpanExporter(**_grpc_arguments("TRACES"))
        _use_encoded(by_grpc, encoder, ExportTraceServiceRequest.FromString)
        _listen(exporter, rejections)
        return exporter
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as by_http

    exporter = by_http.OTLPSpanExporter(session=_session("TRACES", rejections))
    _use_encoded(by_http, encoder, _Encoded)
    return exporter


class _Encoded:
    """The part of a message's interface that the exporter over HTTP uses."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializePartialToString(self) -> bytes:  # noqa: N802 (protobuf's name)
        return self._data


def _use_encoded(exporter: Any, encoder: SpanEncoder, make_message: Callable[[bytes], Any]) -> None:
    """Have an exporter's module make its messages of spans that ``encoder`` has encoded."""

    def encode(spans: Sequence[EncodedSpan]) -> Any:
        return make_message(encoder.message(spans))

    exporter.encode_spans = encode


def metric_exporter(protocol: str, rejections: Rejections) -> MetricExporter:
    """Return an exporter of metrics, configured like :func:`span_exporter`."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc

        exporter = Grpc(**_grpc_arguments("METRICS"))
        _listen(exporter, rejections)
        return exporter
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as Http

    return Http(session=_session("METRICS", rejections))


def _session(signal: str, rejections: Rejections) -> requests.Session | None:
    """Return a session that passes answers to :class:`Rejections`; None if the user configured one."""
    if env.text(_PROVIDER.format("HTTP_")) or env.text(_PROVIDER.format(f"HTTP_{signal}_")):
        return None
    import requests

    def look(response: requests.Response, *_: Any, **__: Any) -> None:
        if 300 <= response.status_code < 400:
            response.close()
            target = response.headers.get("Location", "nowhere")
            raise requests.RequestException(f"{response.status_code}, set {target} as the endpoint")
        answer = _read(response)
        if response.status_code >= 400:
            _refuse(response)
        if response.status_code == 200 and "json" not in response.headers.get("Content-Type", ""):
            rejections.read(answer)

    class Session(requests.Session):
        first: tuple[requests.PreparedRequest, dict[str, Any]] | None = None

        def request(  # type: ignore[override]
            self, method: str, url: str, *, data: bytes, timeout: float, **given: Any
        ) -> requests.Response:
            """Send ``data`` like the first message: to prepare one takes longer than to send it."""
            if self.first is None:
                # Given here, a certificate configured for OTLP takes precedence over REQUESTS_CA_BUNDLE.
                verify = given.get("verify", self.verify)
                settings = self.merge_environment_settings(url, {}, None, verify, given.get("cert"))
                wanted = requests.Request(method.upper(), url, given.get("headers"))
                self.first = self.prepare_request(wanted), settings
            prepared, settings = self.first
            message = prepared.copy()
            message.prepare_cookies(self.cookies)
            message.prepare_body(data, None)
            return self.send(message, timeout=timeout, **settings)

    session = Session()
    session.stream = True  # the answer is read below
    session.hooks["response"].append(look)
    return session


def _refuse(response: requests.Response) -> None:
    """Name the address, which the exporters do not, and when to try again. Raises where that is pointless."""
    import requests

    text = f"{response.url} answers {response.status_code} {response.reason}"
    if response.status_code < 500 and response.status_code not in _TRIED_AGAIN:
        raise requests.RequestException(text)
    later = response.headers.get("Retry-After")
    logger.warning("%s", text if later is None else f"{text}, Retry-After: {later}")


def _read(response: requests.Response) -> bytes:
    """Return the whole answer, or nothing: the connection is closed if it is too long or too slow."""
    import requests

    answer, deadline = bytearray(), time.monotonic() + _ANSWER_SECONDS
    try:
        for byte in response.iter_content(1):  # a larger read would wait for all of it
            answer += byte
            if len(answer) > _LONGEST_ANSWER or time.monotonic() > deadline:
                response.close()
                answer.clear()
                break
    except requests.RequestException:  # the connection broke; the status that has come counts
        answer.clear()
    response._content = bytes(answer)  # for the exporter to read
    return bytes(answer)


def _grpc_arguments(signal: str) -> dict[str, Any]:
    """Return arguments for variables that the exporter does not read as specified."""
    import grpc  # type: ignore[import-untyped]

    gzip = compression(signal, "grpc") == "gzip"  # the exporter rejects "none"
    arguments: dict[str, Any] = {
        "compression": grpc.Compression.Gzip if gzip else grpc.Compression.NoCompression
    }
    files = tls_files(signal)
    has_provider = env.text(_PROVIDER.format("GRPC_")) or env.text(_PROVIDER.format(f"GRPC_{signal}_"))
    # the exporter accepts a client's certificate only together with a trusted one
    if any(files) and not has_provider:
        trusted, chain, key = (Path(path).read_bytes() if path else None for path in files)
        arguments["credentials"] = grpc.ssl_channel_credentials(trusted, key, chain)
    return arguments


def _listen(exporter: Any, rejections: Rejections) -> None:
    """Pass the answers to ``rejections``, also those of a channel opened later."""

    def listening(stub: Any) -> Any:
        export = stub.Export

        def answered(*args: Any, **kwargs: Any) -> Any:
            answer = export(*args, **kwargs)
            rejections.add(answer)
            return answer

        stub.Export = answered
        return stub

    listening(exporter._client)
    make_stub = exporter._stub
    exporter._stub = lambda channel: listening(make_stub(channel))
