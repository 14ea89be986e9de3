"""What a server does between requests: one span for each time, whatever classes its method is spread over."""

from __future__ import annotations

from sgl_aspects.engines import VLLM
from sgl_aspects.tracing.lifecycle import Trackers
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
