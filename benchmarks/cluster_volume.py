"""The volume that a cluster's servers send to a backend, by level and sampled share.

    python -m benchmarks.cluster_volume [--servers 1000 --requests 10 --steps 50 --batch 16 --days 7]

Sizes are measured: requests as SGLang's observers record them and decode steps by the observers themselves
are recorded, joined and encoded as OTLP, in batches as they are sent. The rates are the caller's: requests
and steps a second of each server. Of a share of them it is an upper bound: steps link to fewer requests.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
import time
from typing import NamedTuple

from opentelemetry.trace import SpanKind

from benchmarks.collector import Shapes, joined
from benchmarks.steps import Stage
from sgl_aspects.tracing import context
from sgl_aspects.tracing.export.otlp_encoder import SpanEncoder
from sgl_aspects.tracing.export.span import CollectedSpan
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import RequestBegin, RequestSent

_BATCH = 512
_SAMPLE = 2000
_SECONDS_A_DAY = 86_400
_SHARES = (1.0, 0.05)


class Volume(NamedTuple):
    """The average of one request or step: spans, and bytes as OTLP, plain and by gzip."""

    spans: float
    plain: float
    gzip: float

    def __str__(self) -> str:
        return f"{self.spans:.1f} spans, {self.plain:.0f} bytes, {self.gzip:.0f} by gzip"

    def __add__(self, other: Volume) -> Volume:  # type: ignore[override]
        return Volume(*(a + b for a, b in zip(self, other)))

    def __mul__(self, count: float) -> Volume:  # type: ignore[override]
        return Volume(*(each * count for each in self))


def of_request() -> Volume:
    with tempfile.TemporaryDirectory(prefix="sgl-aspects-bench-") as folder:
        shapes = Shapes(folder, 0, level=1)
        for _ in range(_SAMPLE):
            shapes.request()
        shapes.close()
        return _measured(list(joined(folder)), _SAMPLE)


def of_step(level: int, batch: int) -> Volume:
    """A decode step of ``batch`` requests, each of which it links to."""
    with tempfile.TemporaryDirectory(prefix="sgl-aspects-bench-") as folder:
        front = RingRecorder(folder)
        for number in range(batch):
            span_id = front.new_id()
            origin = context.new()
            front.write(RequestBegin(span_id, f"r{number}", time.monotonic_ns(), *origin, "chat m", {}))
            front.write(RequestSent(span_id))
        stage = Stage(folder, batch)
        calls = [call for _, call in stage.calls(level)]
        stage.be(level)
        for _ in range(_SAMPLE):
            tokens: dict[str, object] = {}
            for call in calls:
                call(tokens)
        front.close()
        stage.recorder.close()
        return _measured([span for span in list(joined(folder)) if span.kind is SpanKind.INTERNAL], _SAMPLE)


def _measured(spans: list[CollectedSpan], count: int) -> Volume:
    encoder = SpanEncoder()
    messages = [encoder.encode(spans[start : start + _BATCH]) for start in range(0, len(spans), _BATCH)]
    sizes = sum(map(len, messages)), sum(len(gzip.compress(each)) for each in messages)
    return Volume(len(spans), *sizes) * (1 / count)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster_volume", description=__doc__)
    parser.add_argument("--servers", type=int, default=1000)
    parser.add_argument("--requests", type=float, default=10, help="a second, of one server")
    parser.add_argument("--steps", type=float, default=50, help="a second, of one server")
    parser.add_argument("--batch", type=int, default=16, help="requests in a step")
    parser.add_argument("--days", type=float, default=7, help="how long a backend keeps them")
    given = parser.parse_args()
    request = of_request()
    levels = {1: request * given.requests}
    print(f"a request: {request}")
    for level in (2, 3):
        step = of_step(level, given.batch)
        levels[level] = levels[1] + step * given.steps
        print(f"a step, level {level}: {step}")
    print(f"| level | sampled | spans/s | MB/s | MB/s by gzip | TB in {given.days:g} days, plain |")
    print("| --- | --- | --- | --- | --- | --- |")
    for level, volume in levels.items():
        for share in _SHARES:
            sent = volume * (share * given.servers)
            stored = sent.plain * _SECONDS_A_DAY * given.days / 1e12
            sizes = f"{sent.plain / 1e6:,.1f} | {sent.gzip / 1e6:,.1f} | {stored:,.1f}"
            print(f"| {level} | {share:.0%} | {sent.spans:,.0f} | {sizes} |")


if __name__ == "__main__":
    main()
