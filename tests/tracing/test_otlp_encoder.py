"""Our encoders of OTLP give the messages that OpenTelemetry's gives."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util import BoundedList
from opentelemetry.trace import SpanKind, Status, StatusCode

from sgl_aspects.tracing.export.otlp_encoder import SpanEncoder
from sgl_aspects.tracing.export.otlp_file import to_json
from sgl_aspects.tracing.export.span import UNSET, CollectedSpan, RootContext
from tests.support.otlp_receiver import grpc_receiver, http_receiver

RESOURCES = [
    Resource({"service.name": "one", "process.pid": 7}, "https://schema"),
    Resource({"service.name": "two", "of many": ["a", "b"]}),
]
VALUES: list[Any] = [
    *("", "text", "ü" * 200, "x" * 70_000, True, False, 0, -1, 127, 128, (1 << 63) - 1, -(1 << 63)),
    *(0.0, -0.5, float("inf"), [], ["a", "b"], [1, 2, 300], [0.5], (True, False)),
]
# Texts for which UTF-8 has no form, numbers of more than 64 bits, other objects.
ODD: list[Any] = ["\ud800 text", 1 << 70, -(1 << 70), ["\udfff", "a"], [1 << 70], [[1]], {"a": 1}]
# 1, 1.0 and True are equal, and are written differently.
TYPED: dict[str, tuple[type, list[Any]]] = {
    "whole": (int, [None, 0, 1, 300, -5, 1 << 40, ODD[1]]),
    "number": (float, [None, 0.0, 1.0, -0.25]),
    "choice": (bool, [None, True, False]),
    "text": (str, [None, "", "decode", "ü" * 300, ODD[0]]),
    "any": (object, [None, 1, 1.0, True, "a", ["a"]]),
}
NAMES = {name: kind for name, (kind, _) in TYPED.items()}


def root(luck: random.Random) -> RootContext:
    ids = luck.getrandbits(128) | 1, luck.getrandbits(64) | 1
    return RootContext(*ids, luck.random() < 0.5, "a=1,b=2" if luck.random() < 0.3 else "")


def any_span(luck: random.Random) -> CollectedSpan:
    start, links = luck.getrandbits(61), [root(luck) for _ in range(luck.randint(0, 9))]
    names = [f"attribute {number}" for number in range(luck.randint(0, 12))]
    attributes: Any = {name: luck.choice([1, 1.0, *VALUES]) for name in names}
    odd = {**attributes, "odd": luck.choice(ODD), "gen_ai.response.id": luck.choice(["a", ODD[0]])}
    attributes = luck.choice([None, odd, BoundedAttributes(3, attributes)])
    why = Status(StatusCode.ERROR, "why ü")
    return CollectedSpan(
        resource=luck.choice(RESOURCES),
        root=root(luck),
        span_id=luck.getrandbits(64) | 1,
        parent_id=(parent_id := luck.choice([0, luck.getrandbits(64) | 1])),
        is_parent_remote=parent_id != 0 and luck.random() < 0.5,
        kind=luck.choice(list(SpanKind)),
        name=luck.choice(["", "forward", "scheduler.step", "chat ü"]),
        start_ns=start,
        end_ns=start + luck.getrandbits(40),
        names=NAMES,
        values=[luck.choice(values) for _, values in TYPED.values()][: luck.randint(0, 5)],
        attributes=attributes,
        links=luck.choice([links, BoundedList.from_seq(2, links)]),
        status=luck.choice([UNSET, Status(StatusCode.OK), Status(StatusCode.ERROR), why]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_same_messages(seed: int) -> None:
    luck, encoder = random.Random(seed), SpanEncoder()
    for size in (0, 1, 2, 40):
        spans = [any_span(luck) for _ in range(size)]
        theirs = encode_spans([span.readable() for span in spans])
        assert ExportTraceServiceRequest.FromString(encoder.encode(spans)) == theirs


@pytest.mark.parametrize("seed", range(8))
def test_the_same_json(seed: int) -> None:
    luck = random.Random(seed)
    for size in (0, 1, 2, 40):
        spans = [any_span(luck).readable() for _ in range(size)]
        theirs = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        for name in ("traceId", "spanId", "parentSpanId"):
            theirs = in_hexadecimal(theirs, name)
        assert json.dumps(to_json(spans), indent=1, sort_keys=True) == json.dumps(
            theirs, indent=1, sort_keys=True
        )


def in_hexadecimal(message: Any, name: str) -> Any:
    """The same message with this field as OTLP writes it."""
    if isinstance(message, list):
        return [in_hexadecimal(each, name) for each in message]
    if not isinstance(message, dict):
        return message
    return {
        key: base64.b64decode(value).hex() if key == name else in_hexadecimal(value, name)
        for key, value in message.items()
    }


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_exporters_use_it(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every version of the exporters, by any name of the function that it replaces."""
    from sgl_aspects.tracing.export import otlp

    receiver = http_receiver if protocol != "grpc" else grpc_receiver
    with receiver() as backend:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", backend.endpoint)
        encoder = SpanEncoder()
        exporter = otlp.span_exporter(protocol, otlp.Rejections("TRACES"), encoder)
        exporter.export([encoder.span(any_span(random.Random(5)))])  # type: ignore[list-item]
        exporter.shutdown()
        assert len(backend.spans) == 1
