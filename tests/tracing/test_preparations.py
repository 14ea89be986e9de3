"""What a server does between requests: one span for each time, whatever classes its method is spread over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_aspects.engines import SGLANG, VLLM
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.lifecycle.calls import Call
from sgl_aspects.tracing.observers.process import PreparationObserver
from sgl_aspects.tracing.options import DEFAULTS
from tests.support.memory_recorder import Memory


def test_a_method_that_overrides_another_and_calls_it_is_one_span() -> None:
    recorder = Memory()
    trackers = Trackers.of(VLLM, recorder, DEFAULTS)
    found = {each.role: each for each in PreparationObserver(trackers).observations()}
    resume, load = found["resume"], found["load_model"]
    for _ in range(2):
        outer = resume.enter((object(),), {})
        inner = resume.enter((object(),), {})
        resume.exit(inner, None, None)
        resume.exit(outer, None, None)
    outer, inner = resume.enter((object(),), {}), load.enter((object(),), {})
    load.exit(inner, None, None)
    resume.exit(outer, None, None)
    assert [span.type.name for span in recorder.ended] == ["resume", "resume", "load_model", "resume"]


@pytest.mark.parametrize(("mode", "links"), [("abort", [[3, 4]]), ("retract", []), ("in_place", [])])
def test_a_pause_by_aborts_is_linked_to_the_requests_of_its_process(mode: str, links: list[Any]) -> None:
    """Of any other mode the scheduler is told, whose own span there is."""
    recorder = Memory()
    trackers = Trackers.of(SGLANG, recorder, DEFAULTS)
    for span_id, rid in ((3, "a"), (4, "b")):
        trackers.calls.live[rid] = Call(span_id, rid, 1, TraceContext(5, 7, True, "", False), "chat mini")
    found = {each.role: each for each in PreparationObserver(trackers).observations()}
    pause = found["pause_by_abort"]
    pause.exit(pause.enter((object(), SimpleNamespace(mode=mode)), {}), None, None)
    assert [span.type.name for span in recorder.ended] == ["pause"] * len(links)
    assert [sorted(span.links) for span in recorder.ended] == links
