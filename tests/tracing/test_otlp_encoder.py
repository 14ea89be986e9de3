"""Our encoder of OTLP gives the messages that OpenTelemetry's gives."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from sgl_aspects.tracing.export.otlp_encoder import SpanEncoder, UnknownValueError
from tests.support.otlp_receiver import grpc_receiver, http_receiver

RESOURCES = [
    Resource({"service.name": "one", "process.pid": 7}, "https://schema"),
    Resource({"service.name": "two", "of many": ["a", "b"]}),
]
SCOPES = [InstrumentationScope("sgl_aspects", "0.1"), InstrumentationScope("other", attributes={"a": 1})]
VALUES: list[Any] = [
    *("", "text", "ü" * 200, "x" * 70_000, True, False, 0, -1, 127, 128, (1 << 63) - 1, -(1 << 63)),
    *(0.0, -0.5, float("inf"), [], ["a", "b"], [1, 2, 300], [0.5], (True, False)),
]


def context(luck: random.Random) -> SpanContext:
    state = TraceState([("a", "1"), ("b", "2")]) if luck.random() < 0.3 else None
    ids = luck.getrandbits(128) | 1, luck.getrandbits(64) | 1
    return SpanContext(*ids, luck.random() < 0.5, TraceFlags(luck.randint(0, 1)), state)


def any_span(luck: random.Random) -> ReadableSpan:
    start = luck.getrandbits(61)
    links = [
        Link(context(luck), {"n": 1} if luck.random() < 0.2 else None) for _ in range(luck.randint(0, 9))
    ]
    names = [f"attribute {number}" for number in range(luck.randint(0, 12))]
    status = luck.choice([StatusCode.UNSET, StatusCode.OK, StatusCode.ERROR])
    return ReadableSpan(
        name=luck.choice(["", "forward", "scheduler.step", "chat ü"]),
        context=context(luck),
        parent=context(luck) if luck.random() < 0.7 else None,
        resource=luck.choice(RESOURCES),
        attributes={name: luck.choice(VALUES) for name in names},
        links=links,
        kind=luck.choice(list(SpanKind)),
        instrumentation_scope=luck.choice([*SCOPES, None]),
        status=Status(status, "why ü" if status is StatusCode.ERROR else None),
        start_time=start,
        end_time=start + luck.getrandbits(40),
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_same_messages(seed: int) -> None:
    luck, encoder = random.Random(seed), SpanEncoder()
    for size in (0, 1, 2, 40):
        spans = [any_span(luck) for _ in range(size)]
        assert ExportTraceServiceRequest.FromString(encoder.encode(spans)) == encode_spans(spans)


def test_what_it_does_not_know_is_left_to_the_other_one() -> None:
    luck = random.Random(1)
    with_event = ReadableSpan("s", context=context(luck), events=[Event("e")], start_time=1, end_time=2)
    with_bytes = ReadableSpan("s", context=context(luck), attributes={"b": b"x"}, start_time=1, end_time=2)
    for span in (with_event, with_bytes):
        with pytest.raises(UnknownValueError):
            SpanEncoder().encode([span])


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_exporters_use_it(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their versions call the function that it stands in for."""
    from sgl_aspects.tracing.export import otlp

    receiver = http_receiver if protocol != "grpc" else grpc_receiver
    with receiver() as backend:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", backend.endpoint)
        encoded: list[int] = []
        encode = SpanEncoder.encode

        def counted(self: SpanEncoder, spans: Sequence[ReadableSpan]) -> bytes:
            encoded.append(len(spans))
            return encode(self, spans)

        monkeypatch.setattr(SpanEncoder, "encode", counted)
        exporter = otlp.span_exporter(protocol, otlp.Rejections("TRACES"))
        exporter.export([any_span(random.Random(5))])
        exporter.shutdown()
        assert len(backend.spans) == len(encoded) == 1
