"""What an engine's room says, and what follows where the engine differs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.engines import VLLM, Engine, Outcome, Role
from sgl_aspects.tracing import observers
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.options import TraceOptions
from tests.support.memory_recorder import Memory
from tests.support.stand_ins import Engine as StandIn


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tmp_path))
    engine = StandIn(tmp_path)
    yield engine
    engine.forget()


def test_a_required_role_that_is_missing_is_one_error_as_the_engine_starts(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It names the engine, the role and what was looked for; the engine goes on, traced in part."""
    stand_in.write("hare.py", "class Scheduler:\n    def schedule(self): return 7\n")
    roles = {
        "schedule": Role(("hare:Scheduler.schedule",), ("scheduler:self",), required=True),
        "run_batch": Role(("hare:Scheduler.run", "hare:Scheduler.run_batch"), required=True),
        "forward": Role(("hare:Runner.forward",)),
    }
    hare = Engine("hare", "hare", roles)
    monkeypatch.setattr(observers, "find_engines", lambda: (hare,))
    undo = observers.weave_observers(Memory())
    try:
        assert stand_in.load("hare").Scheduler().schedule() == 7
    finally:
        for step in reversed(undo):
            step()
    (error,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    for part in ("hare", "run_batch", "hare:Scheduler.run | hare:Scheduler.run_batch", "doctor"):
        assert part in error


@pytest.mark.parametrize(
    ("reason", "outcome", "problem"),
    [
        ("length", Outcome.FINISHED, ""),
        ("stop", Outcome.STOPPED, ""),
        ("abort", Outcome.ABORTED, "abort"),
        ("error", Outcome.FAILED, "error"),
        ("gone", Outcome.ABORTED, "abort"),
        ("a word of its own", Outcome.FINISHED, ""),
    ],
)
def test_an_engine_s_words_for_how_a_request_ended_mean_one_of_four_things(
    reason: str, outcome: Outcome, problem: str
) -> None:
    engine = Engine("hare", "hare", {}, outcomes={"gone": Outcome.ABORTED})
    assert engine.outcome(reason) is outcome
    recorder = Memory()
    calls = Trackers.of(engine, recorder, TraceOptions()).calls
    call = calls.begin(object(), None, 1, rid="r")
    calls.end(call, reason)
    (span,) = recorder.ended
    assert span.error == problem


def test_vllm_has_a_word_more() -> None:
    assert VLLM.outcome("repetition") is Outcome.STOPPED
