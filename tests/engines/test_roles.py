"""The definitions in an engine's room, and errors where the engine differs."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_aspects.engines import SGLANG, VLLM, Engine, Outcome, Role
from sgl_aspects.tracing import observers
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.options import TraceOptions
from tests.support.distributions import install
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
    """The error names the engine, the role and the targets; the engine goes on, traced in part."""
    stand_in.write("hare.py", "class Scheduler:\n    def schedule(self): return 7\n")
    roles = {
        "schedule": Role(("hare:Scheduler.schedule",), required=True),
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


def test_a_step_ends_with_its_run_where_no_function_processes_results(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.write("hare.py", "class Scheduler:\n    def run(self, batch): return 6 / batch\n")
    attributes = {"batch.mode": lambda batch: "denoise", "batch.reqs": lambda batch: ["r"]}
    hare = Engine("hare", "hare", {"run_batch": Role(("hare:Scheduler.run",), ("_", "batch"))}, attributes)
    monkeypatch.setattr(observers, "find_engines", lambda: (hare,))
    recorder = Memory()
    undo = observers.weave_observers(recorder)
    try:
        scheduler = stand_in.load("hare").Scheduler()
        assert scheduler.run(2) == 3
        with pytest.raises(ZeroDivisionError):
            scheduler.run(0)
    finally:
        for step in reversed(undo):
            step()
    whole, failed = [span for span in recorder.ended if span.type.name == "scheduler.step"]
    assert dict(zip(whole.type.attributes, whole.values))["sgl_aspects.batch.tokens"] is None
    assert [whole.error, failed.error] == ["", "ZeroDivisionError"]
    assert {span.type.name for span in recorder.ended} == {"scheduler.step", "run_batch"}


def test_a_beam_search_has_the_tokens_of_the_beams_that_it_returns() -> None:
    read = SGLANG.reader("req.output_tokens")
    beams = [SimpleNamespace(tokens=[5, 6, 7]), SimpleNamespace(tokens=[5, 6]), SimpleNamespace(tokens=[8])]
    group = SimpleNamespace(final_results=beams, num_return=2)
    req = SimpleNamespace(output_ids=[0, 0], finished_len=None, beam_group=group)
    assert read(req) == 5
    group.final_results = []  # it was aborted
    assert read(req) == 2


HARE = "from sgl_aspects.engines import Engine, Role\n"


@pytest.mark.parametrize(
    ("room", "part"),
    [
        ("import a_module_that_is_not_there", "a_module_that_is_not_there"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
        ("ENGINE = 5", "it is 5 (int): name an Engine object"),
        (HARE + "ENGINE = Engine('sglang', 'hare', {})", "already: choose another name"),
        (HARE + "ENGINE = Engine('hare', None, {})", "non-empty texts, not None"),
        (HARE + "ENGINE = Engine('hare', 'hare', {'run_batch': None})", "role 'run_batch' is None"),
        (HARE + "ENGINE = Engine('hare', 'hare', {'run_batch': Role(('no target',))})", "no target"),
        (HARE + "ENGINE = Engine('hare', 'hare', {}, observers=lambda trackers: 1 / 0)", "ZeroDivision"),
    ],
)
def test_a_room_that_fails_is_logged_and_the_others_are_traced(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture, room: str, part: str
) -> None:
    stand_in.write("other.py", "def step(): return 7\n")
    stand_in.write("hare_room.py", room)
    stand_in.write(
        "tame_room.py", HARE + "ENGINE = Engine('tame', 'tame', {'run_batch': Role('other:step')})"
    )
    for name in ("hare", "tame"):
        install(stand_in.folder, f"{name}-room", f"[sgl_aspects.engines]\n{name} = {name}_room:ENGINE\n")
    step = stand_in.load("other").step
    undo = observers.weave_observers(Memory())
    is_traced = stand_in.load("other").step is not step
    for take_off in reversed(undo):
        take_off()
    assert is_traced
    assert stand_in.load("other").step is step
    (error,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "hare" in error.getMessage()
    assert part in caplog.text


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
