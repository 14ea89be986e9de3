"""The origin of a request's trace."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from sgl_aspects.tracing import context
from sgl_aspects.tracing.context import TraceContext

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


def test_traceparent_gives_trace_parent_and_sampled_flag() -> None:
    found = context.from_headers({"TraceParent": f"00-{TRACE}-{SPAN}-01", "TRACESTATE": "vendor=1,other=2"})
    assert found == TraceContext(int(TRACE, 16), int(SPAN, 16), True, "vendor=1,other=2", True)
    unsampled = context.from_headers({"traceparent": f"00-{TRACE}-{SPAN}-02"})
    assert unsampled is not None
    assert not unsampled.sampled


@pytest.mark.parametrize(
    "value",
    [
        "",
        "garbage",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_an_invalid_traceparent_is_ignored(value: str) -> None:
    assert context.from_headers({"traceparent": value, "tracestate": "vendor=1"}) is None
    assert context.of_request({"traceparent": value}).parent_id == 0


def test_a_later_version_may_carry_more_fields() -> None:
    found = context.from_headers({"traceparent": f"cc-{TRACE}-{SPAN}-01-what-the-future-brings"})
    assert found is not None
    assert found.trace_id == int(TRACE, 16)


def test_headers_go_before_the_current_span() -> None:
    current = SpanContext(7, 8, False, TraceFlags(1), TraceState([("a", "b")]))
    with trace.use_span(NonRecordingSpan(current)):
        assert context.of_request(None) == TraceContext(7, 8, True, "a=b", False)
        found = context.of_request({"traceparent": f"00-{TRACE}-{SPAN}-01"})
        assert found.trace_id == int(TRACE, 16)


def test_reading_contexts_loads_no_opentelemetry() -> None:
    code = (
        "import sys; from sgl_aspects.tracing import attach, context; context.of_request({});"
        "import sgl_aspects.tracing.plugin as p; p.activate();"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'torch'))])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
