"""Real OTLP receivers on loopback, HTTP and gRPC, which decode the messages with protobuf."""

from __future__ import annotations

import gzip
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


@dataclass
class Span:
    """One received span, with its ids in hexadecimal and its attributes as Python values."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start: int
    end: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    links: list[tuple[str, str]]
    status: int
    status_message: str
    trace_state: str
    flags: int

    @property
    def is_error(self) -> bool:
        return self.status == 2


@dataclass
class Point:
    """One received figure. ``value`` is a number, or a histogram's sum; ``count`` and buckets are its own."""

    attributes: dict[str, Any]
    value: float
    start: int
    count: int = 0
    bounds: tuple[float, ...] = ()
    buckets: tuple[int, ...] = ()


@dataclass
class Receiver:
    """``requests`` and ``metric_requests`` hold the decoded messages; ``headers`` those of traces."""

    endpoint: str
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    metric_requests: list[ExportMetricsServiceRequest] = field(default_factory=list)
    _spans: list[Span] = field(default_factory=list, repr=False)
    _num_read: int = field(default=0, repr=False)

    def points(self, name: str) -> list[Point]:
        """The metric in the latest message that has it."""
        found: list[Point] = []
        for request in list(self.metric_requests):
            found = list(points_of(request, name)) or found
        return found

    def exemplars(self, name: str) -> list[Any]:
        """The exemplars of a histogram in all messages."""
        return [
            exemplar
            for request in self.metric_requests
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.histogram.data_points
            for exemplar in point.exemplars
        ]

    def metric_resources(self) -> list[dict[str, Any]]:
        """The resource of each message with metrics."""
        messages = [each for request in self.metric_requests for each in request.resource_metrics]
        return [_attributes(message.resource.attributes) for message in messages]

    @property
    def spans(self) -> list[Span]:
        # Each once: tests poll this, and the receiver's threads need the processor, too.
        for request in self.requests[self._num_read :]:
            self._spans.extend(spans_of(request))
            self._num_read += 1
        return list(self._spans)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def wait_for(self, condition: Callable[[list[Span]], bool], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition(self.spans):
            assert time.monotonic() < deadline, f"got only {[span.name for span in self.spans]}"
            time.sleep(0.02)


def below(spans: list[Span], span_id: int) -> list[str]:
    """The names of a span's children, sorted."""
    return sorted(span.name for span in spans if span.parent_id == f"{span_id:016x}")


def spans_of(message: Any) -> Iterator[Span]:
    """Every span of an ``ExportTraceServiceRequest`` or ``TracesData``."""
    for resource_spans in message.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield Span(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=span.kind,
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    resource=resource,
                    links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                    status=span.status.code,
                    status_message=span.status.message,
                    trace_state=span.trace_state,
                    flags=span.flags,
                )


def points_of(message: ExportMetricsServiceRequest, name: str) -> Iterator[Point]:
    """The figures of one metric."""
    for resource_metrics in message.resource_metrics:
        for scope_metrics in resource_metrics.scope_metrics:
            for metric in scope_metrics.metrics:
                if metric.name != name:
                    continue
                for point in metric.histogram.data_points:
                    bounds, buckets = tuple(point.explicit_bounds), tuple(point.bucket_counts)
                    attributes, start = _attributes(point.attributes), point.start_time_unix_nano
                    yield Point(attributes, point.sum, start, point.count, bounds, buckets)
                for number in (*metric.sum.data_points, *metric.gauge.data_points):
                    value = getattr(number, number.WhichOneof("value") or "as_int")
                    yield Point(_attributes(number.attributes), value, number.start_time_unix_nano)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """Run the server in a thread during the block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def backend(
    answer: Callable[[BaseHTTPRequestHandler, bytes], None],
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """An HTTP server that gives each POST request, with its body, to ``answer``; yields its base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_zipped = self.headers["Content-Encoding"] == "gzip"
            with suppress(ConnectionError):  # the sender was killed
                answer(self, gzip.decompress(body) if is_zipped else body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: tests read the requests."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    with serving(server):
        yield f"{'http://127.0.0.1' if tls is None else 'https://localhost'}:{server.server_address[1]}"


@contextmanager
def http_receiver(
    answer: Callable[[BaseHTTPRequestHandler], None] | None = None, tls: ssl.SSLContext | None = None
) -> Iterator[Receiver]:
    """An OTLP/HTTP backend; ``endpoint`` is its base URL. ``answer``: what it does once it has a message."""
    receiver = Receiver("")

    def receive(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if handler.path == "/v1/metrics":
            receiver.metric_requests.append(ExportMetricsServiceRequest.FromString(body))
        elif handler.path == "/v1/traces":
            receiver.headers.append({name.lower(): value for name, value in handler.headers.items()})
            receiver.requests.append(ExportTraceServiceRequest.FromString(body))
        if answer is not None:
            answer(handler)
        else:
            handler.send_response(200 if handler.path in ("/v1/metrics", "/v1/traces") else 404)
            handler.end_headers()

    with backend(receive, tls=tls) as receiver.endpoint:
        yield receiver


@contextmanager
def grpc_receiver(
    response: Any = None, credentials: grpc.ServerCredentials | None = None
) -> Iterator[Receiver]:
    """An OTLP/gRPC backend. ``response``: what it answers to spans."""
    receiver = Receiver("")

    class Servicer(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 (the interface's name)
            receiver.headers.append({key: str(value) for key, value in context.invocation_metadata()})
            receiver.requests.append(request)
            return response or ExportTraceServiceResponse()

    class MetricsServicer(MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 (the interface's name)
            receiver.metric_requests.append(request)
            return ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    add_MetricsServiceServicer_to_server(MetricsServicer(), server)  # type: ignore[no-untyped-call]
    add_TraceServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    if credentials is None:
        receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        receiver.endpoint = f"https://localhost:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()
