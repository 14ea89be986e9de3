"""Goodput: the metric of requests that kept their targets of latency."""

from __future__ import annotations

import time

import pytest

from sgl_aspects.tracing import TraceSession, attach, context
from sgl_aspects.tracing.records import RequestBegin
from sgl_aspects.tracing.schema import REQUEST
from tests.support.otlp_receiver import http_receiver

pytestmark = pytest.mark.usefixtures("forked_collectors")

SECOND = 1_000_000_000


def record(session: TraceSession, seconds: float, first: float, error: str = "", status: int = 0) -> None:
    """Record a request with four tokens."""
    recorder, start = session.recorder, time.monotonic_ns()
    span_id = recorder.new_id()
    recorder.write(
        RequestBegin(span_id, "r", start, *context.new(), "chat m", {"gen_ai.operation.name": "chat"})
    )
    found = {"gen_ai.usage.output_tokens": 4, "gen_ai.latency.time_to_first_token": first}
    found |= {"http.response.status_code": status} if status else {}
    values = [found.get(name) for name in REQUEST.attributes]
    recorder.spans(REQUEST)(span_id, span_id, 0, start, start + int(seconds * SECOND), values, error)


def test_goodput_counts_the_requests_that_kept_both_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in time, a late first token, slow tokens, a failure; a caller's mistake is not counted."""
    monkeypatch.setenv("SGL_ASPECTS_TRACE_TARGET_TTFT", "1")
    monkeypatch.setenv("SGL_ASPECTS_TRACE_TARGET_ITL", "0.6")
    with http_receiver() as receiver:
        with attach(level=1, endpoint=receiver.endpoint) as session:
            record(session, 2.0, 0.5)
            record(session, 2.0, 1.5)
            record(session, 3.0, 0.5)
            record(session, 2.0, 0.5, "RuntimeError")
            record(session, 2.0, 0.5, "BadRequest", 400)
        points = receiver.points("sgl_aspects.goodput.requests")
    counts = {point.attributes["sgl_aspects.goodput.kept"]: point.value for point in points}
    assert counts == {"true": 1, "false": 3}
