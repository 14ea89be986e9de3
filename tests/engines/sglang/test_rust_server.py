"""SGLang with its front end in Rust: of all Python only the scheduler has the requests (make test-sglang)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from tests.support.callers import by_trace
from tests.support.otlp_receiver import Span
from tests.support.phases import assert_whole, engine_receiver
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

COUNT = 32


def is_root(span: Span) -> bool:
    return not span.parent_id and span.name == "text_completion mini" and "Request" not in span.name


def test_its_requests_are_seen_by_the_scheduler(tmp_path: Path) -> None:
    with engine_receiver() as receiver:
        prefix = [sys.executable, "-m", "sgl_aspects", "run", "--level", "2"]
        prefix += ["--endpoint", receiver.endpoint, "--"]
        environment = {
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "SGLANG_RUST_SERVER": "1",
            "SGLANG_RUST_BUILD_MODE": "never",
        }
        with serve(
            make_mini(tmp_path / "mini"), tmp_path / "log", prefix=prefix, environment=environment
        ) as server:
            before = len([span for span in receiver.spans if is_root(span)])  # the warm-up
            answers = server.chats([f"number {number}" for number in range(COUNT)], [{}] * COUNT)
            receiver.wait_for(lambda spans: sum(map(is_root, spans)) >= before + COUNT)
            server.leave_generation("to be left alone", {})
            receiver.wait_for(lambda spans: any("error.type" in s.attributes for s in spans if is_root(s)))
    roots = sorted(filter(is_root, receiver.spans), key=lambda span: span.start)
    assert_whole(roots[-COUNT - 1 : -1], answers, by_trace(receiver.spans))
    assert roots[-1].attributes["error.type"] == "abort"
    assert receiver.named("scheduler.step")
    assert orphaned(receiver.spans) == []


def orphaned(spans: list[Span]) -> list[str]:
    known = {span.span_id for span in spans}
    return [span.name for span in spans if span.parent_id and span.parent_id not in known]
