"""The effect of a backend's state on the engine: python -m benchmarks.backends [MINUTES].

A traced engine makes token after token, while its backend is well, slow (two seconds a request), refusing
(503) or down, in turns in random order: the time of a step in each state, and the collector's memory.
"well again" is the same as "well": their difference is noise.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.receiver import start
from benchmarks.turns import more
from sgl_aspects.cli.models import ensure_model
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.tracing.collect.summary import TraceSummary
from sgl_aspects.tracing.session import attach

WELL = ("well", "well again")
STATES = (*WELL, "slow", "refusing", "down")
TURN_SECONDS = 10
# The queue is small, so that a turn fills it.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_BSP_MAX_QUEUE_SIZE": "1024"}


@dataclass
class State:
    """The results by turn: milliseconds of a step, and the collector's megabytes at the end."""

    median: list[float] = field(default_factory=list)
    worst: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


class Backend:
    """A receiver, started again for each state on the same port; ``down``: not started."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None
        self._process, self.port = start()

    def be(self, state: str) -> None:
        self.close()
        if state != "down":
            self._process, _ = start(self.port, "well" if state in WELL else state)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def measure(minutes: float) -> tuple[dict[str, State], TraceSummary]:
    os.environ.update(ENVIRONMENT)
    found = {state: State() for state in STATES}
    backend = Backend()
    with (
        attach(level=3, endpoint=f"http://127.0.0.1:{backend.port}/backends") as session,
        Engine(model_path=ensure_model(), max_total_tokens=4096) as engine,
    ):
        list(_steps(engine, 2))
        end = time.monotonic() + minutes * 60
        while time.monotonic() < end:
            for state in random.sample(STATES, len(STATES)):
                backend.be(state)
                steps = sorted(_steps(engine, TURN_SECONDS))
                found[state].median.append(statistics.median(steps))
                found[state].worst.append(steps[len(steps) * 99 // 100])
                found[state].memory.append(_megabytes(session.collector_process_id))
        backend.be("well")
    backend.close()
    assert session.summary is not None
    return found, session.summary


def _steps(engine: Engine, seconds: float) -> Iterator[float]:
    """Milliseconds from one token to the next."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = 0
        for _ in engine.stream("Once upon a time", SamplingParams(max_new_tokens=50, ignore_eos=True)):
            now = time.perf_counter_ns()
            if before:
                yield (now - before) / 1e6
            before = now


def _megabytes(process_id: int | None) -> float:
    resident = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process_id}/status").read_text())
    return int(resident[1]) / 1024 if resident else 0.0


def table(minutes: float = 4) -> str:
    """One row a state."""
    found, summary = measure(minutes)
    well = found["well"]
    lines = [
        f"Level 3, {len(well.median)} turns of {TURN_SECONDS} s a state. {summary}.",
        "",
        "| backend | step, median | 99th percentile | collector's memory |",
        "| --- | --- | --- | --- |",
    ]
    for name, state in found.items():
        cells = [f"{statistics.median(values):.1f} ms" for values in (state.median, state.worst)]
        if state is not well:
            cells[0] += f", {more([one / other for one, other in zip(state.median, well.median)])}"
            cells[1] += f", {more([one / other for one, other in zip(state.worst, well.worst)])}"
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {max(state.memory):.0f} MB |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(float(sys.argv[1]) if len(sys.argv) > 1 else 4))
