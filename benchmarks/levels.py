"""What tracing costs an engine with a real small model, at each level: python -m benchmarks.levels [MINUTES].

One traced engine whose level is changed live, so that nothing else differs, and two that were never traced:
what these two differ by is what two processes that do the same differ by. They work in turns of half a
second (see :mod:`.turns`). The engines compute on one processor, as one does whose model runs on an
accelerator, and start anew several times. The collector exports over OTLP at once, so that what it does in
a turn belongs to that turn.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.receiver import receiver
from benchmarks.spans import processor_seconds
from benchmarks.turns import cycles, interval, more, ratios
from sgl_aspects.cli.models import ensure_model
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.tracing import ring_format
from sgl_aspects.tracing.control import Control, write_control
from sgl_aspects.tracing.session import attach

UNTRACED, CONTROL = "untraced", "untraced too"
SETTINGS = (UNTRACED, CONTROL, "0", "1", "2", "3", "4")
RESTARTS, REQUESTS, SETTLING, TOKENS = 4, 2, 6, 12
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OTEL_BSP_SCHEDULE_DELAY": "100"}


class Costs:
    """Of all restarts: each cycle's seconds by setting, and the processor time of the collector by level."""

    def __init__(self) -> None:
        self.restarts: list[list[dict[str, float]]] = []
        self.collector: dict[str, list[float]] = {setting: [] for setting in SETTINGS}

    @property
    def cycles(self) -> list[dict[str, float]]:
        return [cycle for restart in self.restarts for cycle in restart]

    def of_processes(self, setting: str) -> list[float]:
        """The ratios to an untraced engine of one start."""
        return [statistics.median(ratios(found, setting, UNTRACED)) for found in self.restarts]


@contextmanager
def turn(costs: Costs) -> Iterator[Callable[[str], float]]:
    """Three new engines, and what gives the seconds of a batch with one setting."""
    model = ensure_model()
    with (
        receiver() as url,
        Engine(model_path=model, max_total_tokens=4096) as untraced,
        Engine(model_path=model, max_total_tokens=4096) as control,
        attach(level=4, endpoint=url + "/levels") as session,
        Engine(model_path=model, max_total_tokens=4096) as traced,
    ):
        traced.generate("warm", SamplingParams(max_new_tokens=2))
        (ring,) = Path(session.run_folder).glob(f"{traced.scheduler_pid}-*.ring")
        collector = session.collector_process_id or 0

        def seconds(setting: str) -> float:
            level = int(setting) if setting.isdecimal() else 0
            engine = traced if setting.isdecimal() else control if setting == CONTROL else untraced
            write_control(ring, Control(level, 4))
            # This process's own: opening the file would give its lock up.
            session.recorder._words[ring_format.WORD_LEVEL] = level  # type: ignore[union-attr]
            _generate(engine, SETTLING)  # what the turn before has left to do is done
            busy, start = processor_seconds(collector), time.perf_counter()
            _generate(engine, TOKENS)
            took = time.perf_counter() - start
            costs.collector[setting].append((processor_seconds(collector) - busy) / took)
            return took

        for setting in SETTINGS:
            seconds(setting)
        yield seconds


def _generate(engine: Engine, tokens: int) -> None:
    engine.generate(["Once upon a time"] * REQUESTS, SamplingParams(max_new_tokens=tokens, ignore_eos=True))


def measure(minutes: float) -> Costs:
    os.environ.update(ENVIRONMENT)
    costs = Costs()
    for _ in range(RESTARTS):
        with turn(costs) as seconds:
            costs.restarts.append(cycles(SETTINGS, minutes * 60 / RESTARTS, seconds))
    return costs


def table(minutes: float = 5) -> str:
    """One row a level: how much longer the same work takes."""
    costs = measure(minutes)
    found = costs.cycles
    step = statistics.median(cycle["0"] for cycle in found) / 2 / (TOKENS + 1) * 1e3
    lines = [
        f"{REQUESTS} requests, {step:.0f} ms a step, {len(found)} cycles, {RESTARTS} starts of the engines.",
        "",
        "| level | time | collector, of one processor |",
        "| --- | --- | --- |",
    ]
    for name, setting in (("an untraced engine, against another", CONTROL), ("0, against untraced", "0")):
        _, middle, _ = interval(costs.of_processes(setting))
        low, high = min(costs.of_processes(setting)), max(costs.of_processes(setting))
        cell = f"{100 * (middle - 1):+.2f} % ({100 * (low - 1):+.2f} to {100 * (high - 1):+.2f}, by start)"
        lines.append(f"| {name} | {cell} | {_share(costs, setting)} |")
    for level in ("1", "2", "3", "4"):
        cell = more(ratios(found, level, "0"))
        lines.append(f"| {level}, against 0 | {cell} | {_share(costs, level)} |")
    return "\n".join(lines)


def _share(costs: Costs, setting: str) -> str:
    return f"{100 * statistics.fmean(costs.collector[setting]):.2f} %"


if __name__ == "__main__":
    print(table(float(sys.argv[1]) if len(sys.argv) > 1 else 5))
