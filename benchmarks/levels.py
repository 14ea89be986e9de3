"""What tracing costs an engine with a real small model, at each level: python -m benchmarks.levels [PAIRS].

One engine whose level is changed live, so that nothing else differs: pairs of the same batch with tracing off
(level 0: woven, nothing recorded) and on, in changing order. Level 0 itself is compared with a second engine
that was never traced. Told are medians of the pairs' ratios, with the 95 % interval of the median: of the
time, and of the processor time of the scheduler's process, which a busy machine disturbs less.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.spans import processor_seconds
from sgl_aspects.cli.models import ensure_model
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.tracing import ring_format
from sgl_aspects.tracing.control import Control, write_control
from sgl_aspects.tracing.session import attach

LEVELS = (0, 1, 2, 3, 4)
PAIRS, REQUESTS, TOKENS = 40, 2, 16


@dataclass
class Level:
    """Of each pair: with this level to without, of the wall clock and of the scheduler's processor time."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def interval(values: list[float]) -> tuple[float, float, float]:
    """The median and the bounds of its 95 % confidence interval: a median's are two of the values."""
    ordered, count = sorted(values), len(values)
    inside, rank = 1.0, 0
    while rank + 1 < count / 2:
        chance = 2 * math.comb(count, rank) / 2**count
        if inside - chance < 0.95:
            break
        inside, rank = inside - chance, rank + 1
    low = max(rank - 1, 0)
    return ordered[low], statistics.median(values), ordered[count - 1 - low]


def measure(pairs: int = PAIRS) -> tuple[dict[int, Level], float]:
    """By level; and the milliseconds of a step without tracing."""
    model, sampling = ensure_model(), SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    levels = {level: Level() for level in LEVELS}
    off_seconds: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Engine(model_path=model, max_total_tokens=4096) as untraced,
        attach(level=4, file=str(Path(folder, "traces.jsonl"))) as session,
        Engine(model_path=model, max_total_tokens=4096) as traced,
    ):
        traced.generate("warm", sampling)
        (ring,) = Path(session.run_folder).glob(f"{traced.scheduler_pid}-*.ring")

        def seconds(engine: Engine, level: int) -> tuple[float, float]:
            write_control(ring, Control(level, 4))
            # This process's own: opening the file would give its lock up.
            session.recorder._words[ring_format.WORD_LEVEL] = level  # type: ignore[union-attr]
            processor, start = processor_seconds(engine.scheduler_pid), time.perf_counter()
            engine.generate(["Once upon a time"] * REQUESTS, sampling)
            return time.perf_counter() - start, processor_seconds(engine.scheduler_pid) - processor

        for turn in range(pairs + 1):
            for level, found in levels.items():
                runs: dict[str, Callable[[], tuple[float, float]]] = {
                    "without": lambda level=level: seconds(traced if level else untraced, 0),  # type: ignore[misc]
                    "with": lambda level=level: seconds(traced, level),  # type: ignore[misc]
                }
                order = sorted(runs, reverse=bool(turn % 2))
                took = {which: runs[which]() for which in order}
                if turn:  # the first pairs warm up
                    found.wall.append(took["with"][0] / took["without"][0])
                    found.processor.append(took["with"][1] / took["without"][1])
                    off_seconds.append(took["without"][0])
    return levels, statistics.median(off_seconds) / (TOKENS + 1) * 1e3


def table(pairs: int = PAIRS) -> str:
    """One row a level: per cent more than without."""
    levels, step = measure(pairs)
    lines = [
        f"{REQUESTS} requests of {TOKENS} tokens, {step:.0f} ms a step, {pairs} pairs a level.",
        "",
        "| level | time | scheduler's processor time |",
        "| --- | --- | --- |",
    ]
    for level, found in levels.items():
        cells = []
        for values in (found.wall, found.processor):
            low, middle, high = (100 * (value - 1) for value in interval(values))
            cells.append(f"{middle:+.2f} % ({low:+.2f} to {high:+.2f})")
        against = "0, against an engine that was never traced" if level == 0 else f"{level}, against level 0"
        lines.append(f"| {against} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(int(sys.argv[1]) if len(sys.argv) > 1 else PAIRS))
