"""Processes that are attached to, whose wall clock is corrected meanwhile."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.attachable import attaching, finish, running, spans_in
from tests.support.processes import wait_until
from tests.support.wall_clock import wall_clock

pytestmark = [pytest.mark.attach, pytest.mark.usefixtures("ptrace")]


@pytest.mark.parametrize("seconds", [-365 * 86400, 3600])
def test_jumps_before_and_after_the_attach(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = wall_clock(tmp_path)
    for name, value in clock.environment.items():
        monkeypatch.setenv(name, value)  # of the program, the command and the collector, but not of the test
    with running(tmp_path) as program:
        begin = time.time_ns()
        process = attaching(program, "--for=3s")
        wait_until(lambda: "woven" in program.states)
        clock.jump(seconds)
        output = finish(process)
        end = time.time_ns()
    assert process.returncode == 0, output
    spans = spans_in(tmp_path / "spans.jsonl")
    assert len(spans) > 100
    times = [(int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])) for span in spans]
    assert [each for each in times if not begin <= each[0] <= each[1] <= end] == []
