"""The cost of tracing for the embedded engine with a small real model, at each level:

    python -m benchmarks.levels [MINUTES [SUBJECT ...]]

One engine that makes token after token, in turns of a few steps with tracing and without (:mod:`.turns`): its
level is changed live, so that nothing else differs. The collector, which exports over OTLP, is stopped while
the level is 0, so that its work for a level is done in that level's turns. The engine computes on one
processor, like one whose model runs on an accelerator.

"attached" compares level 0 with hooks and level 0 without any, each function the engine's own again;
"nothing" compares level 0 with itself: its distance from 0 is noise.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from benchmarks.receiver import receiver
from benchmarks.spans import processor_seconds
from benchmarks.switch import Switch
from benchmarks.turns import Pair, alternate, more
from sgl_aspects.cli.models import ensure_model
from sgl_aspects.run.control import Control, write_control
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.tracing.record import format as ring_format
from sgl_aspects.tracing.session import TraceSession, attach

NOTHING, ATTACHED = "nothing", "attached"
SUBJECTS = (NOTHING, ATTACHED, "1", "2", "3", "4")
SECONDS = 8  # of one subject before the next
TOKENS = 200
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OTEL_BSP_SCHEDULE_DELAY": "500"}


class Subject:
    """Pairs of turns with tracing and without, and the collector's share of a processor in them."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.collector: list[float] = []


class Traced:
    """A busy engine in which tracing is switched on and off."""

    def __init__(self, engine: Engine, session: TraceSession, switch: Switch) -> None:
        self._engine, self._session, self._switch = engine, session, switch
        self.collector = session.collector_process_id or 0
        (self._ring,) = Path(session.run_folder).glob(f"{engine.scheduler_pid}-*.ring")

    def be(self, subject: str, is_on: bool) -> None:
        if subject == ATTACHED:
            self._switch.turn(is_on)
        elif subject != NOTHING:
            level = int(subject) if is_on else 0
            write_control(self._ring, Control(level, 4))
            # This process's own: opening the file would give its lock up.
            self._session.recorder.steps.words[ring_format.WORD_LEVEL] = level  # type: ignore[union-attr]
            os.kill(self.collector, signal.SIGCONT if is_on else signal.SIGSTOP)

    def steps(self) -> Generator[float, None, None]:
        """The seconds from one token to the next."""
        while True:
            before = 0.0
            sampling = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
            for _ in self._engine.stream("Once upon a time", sampling):
                now = time.perf_counter()
                if before:
                    yield now - before
                before = now


def measure(minutes: float, subjects: Sequence[str]) -> tuple[dict[str, Subject], float]:
    """Return the measurements by subject, and the milliseconds of a step."""
    found = {subject: Subject() for subject in subjects}
    with tempfile.TemporaryDirectory() as folder, receiver() as url:
        switch = Switch(Path(folder))
        os.environ.update(ENVIRONMENT | switch.environment)
        sys.path.insert(0, folder)
        with (
            attach(level=4, endpoint=url + "/levels") as session,
            Engine(model_path=ensure_model(), max_total_tokens=4096) as engine,
        ):
            engine.generate("warm", SamplingParams(max_new_tokens=2))
            traced = Traced(engine, session, switch)
            try:
                with closing(traced.steps()) as steps:
                    traced.be("1", False)
                    step = statistics.median(next(steps) for _ in range(50))
                    end = time.monotonic() + minutes * 60
                    while time.monotonic() < end:
                        for name in random.sample(subjects, len(subjects)):
                            _measure(found[name], traced, name, steps)
            finally:
                os.kill(traced.collector, signal.SIGCONT)
    return found, step * 1e3


def _measure(subject: Subject, traced: Traced, name: str, steps: Iterator[float]) -> None:
    busy, start = processor_seconds(traced.collector), time.monotonic()
    subject.pairs += alternate(steps, partial(traced.be, name), SECONDS)
    spent = processor_seconds(traced.collector) - busy
    subject.collector.append(2 * spent / (time.monotonic() - start))
    traced.be("1", False)
    traced.be(ATTACHED, True)


def table(minutes: float = 5, subjects: Sequence[str] = SUBJECTS) -> str:
    """One row a subject: how much longer a step takes, by the median and by the mean of a turn's steps."""
    found, step = measure(minutes, subjects)
    lines = [
        f"A step of {step:.0f} ms; {min(len(subject.pairs) for subject in found.values())} pairs of turns.",
        "",
        "| level | a step | all steps | collector, of one processor |",
        "| --- | --- | --- | --- |",
    ]
    for name, subject in found.items():
        medians, means = map(more, zip(*subject.pairs))
        collector = 100 * statistics.fmean(subject.collector)
        lines.append(f"| {name} | {medians} | {means} | {collector:.1f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(float(sys.argv[1]) if sys.argv[1:] else 5, sys.argv[2:] or SUBJECTS))
