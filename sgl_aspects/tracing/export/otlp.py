"""OpenTelemetry's OTLP exporters, and what they do not look at in a backend's answer.

A backend may take a message and reject a part of it, or send the exporter elsewhere: the exporters call both
a success. Here the one is counted and the other a failure.
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
from sgl_aspects.tracing.export.otlp_encoder import SpanEncoder
from sgl_aspects.tracing.export.span import CollectedSpan
from sgl_aspects.tracing.export.variables import compression, tls_files

if TYPE_CHECKING:
    import requests

logger = logging.getLogger(__name__)

# An answer is a few bytes; of more, or what comes slower, nothing is read.
_LONGEST_ANSWER = 4096
_ANSWER_SECONDS = 2.0
_PROVIDER = "OTEL_PYTHON_EXPORTER_OTLP_{}CREDENTIAL_PROVIDER"


class Rejections:
    """What a backend did not take of the messages that it accepted. ``signal``: TRACES or METRICS."""

    def __init__(self, signal: str) -> None:
        self._is_of_spans = signal == "TRACES"
        self._count = 0

    def take(self) -> int:
        """How many since the last time."""
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
        """An ``Export…ServiceResponse``."""
        partial = message.partial_success
        count = partial.rejected_spans if self._is_of_spans else partial.rejected_data_points
        self._count += max(0, count)
        if count > 0 or partial.error_message:
            what = "spans" if self._is_of_spans else "data points"
            logger.warning(
                "the backend rejected %d %s: %s", count, what, partial.error_message or "no reason"
            )


def span_exporter(protocol: str, rejections: Rejections) -> SpanExporter:
    """An exporter of collected spans. Endpoint, headers and the rest it reads from the environment."""
    exporter: SpanExporter
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as by_grpc

        exporter = by_grpc.OTLPSpanExporter(**_grpc_arguments("TRACES"))
        use_encoder(by_grpc, ExportTraceServiceRequest.FromString)
        _listen(exporter, rejections)
        return exporter
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as by_http

    exporter = by_http.OTLPSpanExporter(session=_session("TRACES", rejections))
    use_encoder(by_http, _Encoded)
    return exporter


class _Encoded:
    """As much of a message as the exporter over HTTP asks for."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializePartialToString(self) -> bytes:  # noqa: N802 (protobuf's name)
        return self._data


def use_encoder(exporter: Any, make_message: Callable[[bytes], Any]) -> None:
    """Have an exporter's module encode collected spans, by :class:`SpanEncoder`."""
    encoder = SpanEncoder()

    def encode(spans: Sequence[CollectedSpan]) -> Any:
        return make_message(encoder.encode(spans))

    exporter.encode_spans = encode


def metric_exporter(protocol: str, rejections: Rejections) -> MetricExporter:
    """Likewise, for metrics."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc

        exporter = Grpc(**_grpc_arguments("METRICS"))
        _listen(exporter, rejections)
        return exporter
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as Http

    return Http(session=_session("METRICS", rejections))


def _session(signal: str, rejections: Rejections) -> requests.Session | None:
    """A session that reads answers as :class:`Rejections` wants them; None where the user names one."""
    if env.text(_PROVIDER.format("HTTP_")) or env.text(_PROVIDER.format(f"HTTP_{signal}_")):
        return None
    import requests

    def look(response: requests.Response, *_: Any, **__: Any) -> None:
        if 300 <= response.status_code < 400:
            response.close()
            target = response.headers.get("Location", "nowhere")
            raise requests.RequestException(f"{response.status_code}, make {target} the endpoint")
        answer = _read(response)
        if response.status_code == 200 and "json" not in response.headers.get("Content-Type", ""):
            rejections.read(answer)

    class Session(requests.Session):
        def merge_environment_settings(
            self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any
        ) -> Any:
            # REQUESTS_CA_BUNDLE would go before the certificate that is named for this.
            verify = self.verify if isinstance(self.verify, str) else verify
            return super().merge_environment_settings(url, proxies, stream, verify, cert)

    session = Session()
    session.stream = True  # the answer is read here
    session.hooks["response"].append(look)
    return session


def _read(response: requests.Response) -> bytes:
    """The whole answer, or nothing: the connection is closed where there is more, or it comes too slowly."""
    import requests

    answer, deadline = bytearray(), time.monotonic() + _ANSWER_SECONDS
    try:
        for byte in response.iter_content(1):  # more at once would wait for all of it
            answer += byte
            if len(answer) > _LONGEST_ANSWER or time.monotonic() > deadline:
                response.close()
                answer.clear()
                break
    except requests.RequestException:  # it breaks off; its status has come, and counts
        answer.clear()
    response._content = bytes(answer)  # what the exporter may look at
    return bytes(answer)


def _grpc_arguments(signal: str) -> dict[str, Any]:
    """What the exporter would read otherwise than its variables are meant."""
    import grpc  # type: ignore[import-untyped]

    gzip = compression(signal, "grpc") == "gzip"  # "none" is an error to the exporter
    arguments: dict[str, Any] = {
        "compression": grpc.Compression.Gzip if gzip else grpc.Compression.NoCompression
    }
    files = tls_files(signal)
    asks_provider = env.text(_PROVIDER.format("GRPC_")) or env.text(_PROVIDER.format(f"GRPC_{signal}_"))
    if any(files) and not asks_provider:  # it takes a client's certificate only where it gets another one
        trusted, chain, key = (Path(path).read_bytes() if path else None for path in files)
        arguments["credentials"] = grpc.ssl_channel_credentials(trusted, key, chain)
    return arguments


def _listen(exporter: Any, rejections: Rejections) -> None:
    """Shows the answers to ``rejections``, also those that come over a channel opened later."""

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
