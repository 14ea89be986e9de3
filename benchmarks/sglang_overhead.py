"""The cost of tracing for a real SGLang server with a real small model (in .sglang-venv):

    python -m benchmarks.sglang_overhead [--minutes 4] [--model FOLDER] [--sizes 1 16] [--subjects 2 3]
    python -m benchmarks.sglang_overhead --device cuda --model FOLDER --sizes 1 16 64 [--eager] [--turn 60]

One server that makes token after token, in turns of a few steps with tracing and without (:mod:`.turns`): the
level is changed live, so that nothing else differs. A step goes from one call of the scheduler's method that
processes its result to the next, stamped there, on the wall and by the thread's own processor time.
"nothing" compares level 0 with itself: its distance from 0 is noise. SGLang's own tracing (--enable-trace,
level 3; SGLANG_TRACE_ASYNC=1 in the environment is its other mode) is decided with each request: there turns
are requests, timed by their client.

All export over OTLP to one receiver. Our collector is stopped while the level is 0, so that its work for a
level is done in that level's turns. :mod:`.vllm_overhead` does the same with vLLM.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.load import Device, Load, make_device, serving
from benchmarks.step_times import StepTimes, thread_mean
from benchmarks.turns import compare, interval
from sgl_aspects.run.control import Control, write_control
from sgl_aspects.run.folder import runs
from tests.support.engine_server import EngineServer

NOTHING, SGLANGS = "nothing", "enable-trace"
STEPS = {
    "sglang": "sglang.srt.managers.scheduler:Scheduler.process_batch_result",
    "vllm": "vllm.v1.core.sched.scheduler:Scheduler.update_from_output",
}
ROUNDS = 3


class Traced(Load):
    """A traced server in which tracing is switched on and off. ``steps``: the seconds of each."""

    def __init__(self, server: EngineServer, device: Device, steps: StepTimes) -> None:
        super().__init__(server, device)
        self.steps = steps
        (first,) = (ring for run in runs() for ring in run.glob(f"{server.process.pid}-*.ring"))
        self._rings = list(first.parent.glob("*.ring"))
        (self._collector,) = _collectors(first.parent)

    def be(self, subject: str, is_on: bool) -> None:
        if subject == SGLANGS:
            self.server.get(f"/set_trace_level?level={3 if is_on else 0}")
        elif subject != NOTHING:
            for ring in self._rings:
                write_control(ring, Control(int(subject) if is_on else 0, 4))
            self.collect(is_on)
        self.steps.forget()

    def collect(self, is_on: bool) -> None:
        os.kill(self._collector, signal.SIGCONT if is_on else signal.SIGSTOP)


def _collectors(run: Path) -> Iterator[int]:
    """The process ids of a run's collectors, without the small program that restarts a killed one."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        words = process.read_bytes().split(b"\0")
        if str(run).encode() in words and not any(word.endswith(b"keeper.py") for word in words):
            yield int(process.parent.name)


def measure(
    traced: Traced, device: Device, size: int, subjects: Sequence[str], seconds: float
) -> Iterator[str]:
    """Return the rows of a table, one for each subject: the time that it adds to a step."""
    found: dict[str, list[tuple[float, ...]]] = {subject: [] for subject in subjects}
    traced.be("2", False)
    with traced.at_work(size):
        for _ in range(device.warm_up):
            next(traced.steps)
        steps = [next(traced.steps) for _ in range(device.warm_up)]
    wall, thread = statistics.median(steps), thread_mean(steps)
    print(f"batch of {size}: a step takes {wall * 1e3:.3f} ms, its thread {thread * 1e3:.3f} ms", flush=True)
    for _ in range(ROUNDS):
        for subject in random.sample(subjects, len(subjects)):
            switch, share = partial(traced.be, subject), seconds / ROUNDS / len(subjects)
            if subject == SGLANGS:
                kinds = (statistics.median, statistics.fmean)
                found[subject] += compare(traced.requests(size), switch, share, kinds, skip=0, count=2)
                continue
            with traced.at_work(size):
                kinds = (statistics.median, statistics.fmean, thread_mean)
                found[subject] += compare(
                    traced.steps, switch, share, kinds, skip=device.skip, count=device.turn
                )
    for subject, pairs in found.items():
        cells = [_change(ratios, base) for ratios, base in zip(zip(*pairs), (wall, wall, thread))]
        cells += ["-"] * (3 - len(cells))  # of a request its client sees no thread
        yield f"| {size} | {wall * 1e3:.2f} ms | {subject} | {' | '.join(cells)} | {len(pairs)} |"


def _change(ratios: Sequence[float], base: float) -> str:
    """The median of the ratios with its 95 % interval, as per cent and as microseconds of ``base``."""
    low, middle, high = (value - 1 for value in interval(ratios))
    return (
        f"{middle:+.2%} ({low:+.2%} to {high:+.2%}), "
        f"{middle * base * 1e6:+.1f} µs ({low * base * 1e6:+.1f} to {high * base * 1e6:+.1f})"
    )


HEADER = """
| batch | step | subject | median step | all steps | processor time of the scheduler's thread | pairs |
| ---: | ---: | --- | --- | --- | --- | ---: |"""


def main(engine: str = "sglang") -> None:
    subjects = (NOTHING, "2", "3", *((SGLANGS,) if engine == "sglang" else ()))
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{engine}_overhead")
    parser.add_argument("--minutes", type=float, default=4, help="of measuring, in all")
    parser.add_argument("--model", type=Path, help="the folder of a model; SmolLM2 is made otherwise")
    parser.add_argument(
        "--device", default="cpu", help="cpu, or one that SGLang's own platform drives (cuda)"
    )
    parser.add_argument("--eager", action="store_true", help="decode without captured graphs")
    parser.add_argument("--turn", type=int, help="steps of one turn")
    parser.add_argument("--sizes", type=int, nargs="+", default=(1, 16), help="requests in a batch")
    parser.add_argument("--subjects", nargs="+", choices=subjects, default=subjects)
    given = parser.parse_args()
    device = make_device(given.device, eager=given.eager, largest_batch=max(given.sizes))
    if given.turn:
        device = replace(device, turn=given.turn)
    own = ("--enable-trace", "--otlp-traces-endpoint", "{url}/sglangs/v1/traces")
    rows = [HEADER]
    with tempfile.TemporaryDirectory() as folder:
        steps = StepTimes(Path(folder), STEPS[engine])
        more = own if SGLANGS in given.subjects else ()
        with serving(engine, given.model, device, steps.environment, more) as server:
            traced = Traced(server, device, steps)
            try:
                if more:
                    traced.be(SGLANGS, False)
                for size in given.sizes:
                    share = given.minutes * 60 / len(given.sizes)
                    rows += measure(traced, device, size, given.subjects, share)
                    print("\n".join(rows), flush=True)
            finally:
                traced.collect(True)


if __name__ == "__main__":
    main()
