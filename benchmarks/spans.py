"""The cost of a span, in the traced thread and in its whole process, with one tracer and another.

Each tracer of benchmarks/tracers.py works in a process of its own; rounds go from one to the next, so that a
slow moment of the machine hits all of them. python -m benchmarks.spans prints the table.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.receiver import counted, receiver
from benchmarks.tracers import TRACERS

ROUNDS, SPANS = 15, 4000
BASE = "OTel SDK, batch, OTLP"
#: The result of a round: nanoseconds per span.
THREAD, PROCESS = "thread", "process"


@dataclass
class Result:
    """Medians over the rounds in nanoseconds a span; ``collector`` is another process's share, or None."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    collector: float | None = None
    exported: float | None = None
    missing: str = ""

    def median(self, what: str) -> float:
        return statistics.median(each[what] for each in self.rounds)


def _work(name: str, url: str) -> None:
    """Run a round for each line of standard input, in the tracer's process."""
    tracer = TRACERS[name](url)
    print("ready", flush=True)
    collector_before = 0.0
    for number, _ in enumerate(sys.stdin):
        if number == 1:  # the first round warms up
            collector_before = processor_seconds(tracer.collector) if tracer.collector else 0.0
        gc.collect()
        process = time.process_time_ns()
        thread, span = time.thread_time_ns(), tracer.span
        for _ in range(SPANS):
            span()
        thread = time.thread_time_ns() - thread
        tracer.flush()
        process = time.process_time_ns() - process
        if tracer.collector:
            _wait_until_idle(tracer.collector)
        print(json.dumps({THREAD: thread / SPANS, PROCESS: process / SPANS}), flush=True)
    if tracer.collector:
        time.sleep(6)  # a batch goes after five seconds at the latest
        spent = processor_seconds(tracer.collector) - collector_before
        print(json.dumps(spent * 1e9 / SPANS / ROUNDS), flush=True)
    tracer.close()


def _wait_until_idle(process_id: int) -> None:
    """Wait until the process has finished its work, which must not disturb the next measurement."""
    worked = -1.0
    while worked != (worked := processor_seconds(process_id) // 0.01):
        time.sleep(0.4)  # it polls every 200 ms, and batches wait as long


def processor_seconds(process_id: int) -> float:
    """Return the processor time of all threads of a process."""
    threads = Path(f"/proc/{process_id}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def measure() -> dict[str, Result]:
    """Return the results by the tracer's name."""
    results = {name: Result() for name in TRACERS}
    with receiver() as url:
        workers: dict[str, subprocess.Popen[str]] = {}
        for number, name in enumerate(TRACERS):
            command = [sys.executable, "-m", "benchmarks.spans", name, f"{url}/{number}"]
            worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            if _line(worker) == "ready\n":
                workers[name] = worker
            else:
                assert worker.stderr is not None
                results[name].missing = (worker.stderr.read().splitlines() or ["it did not start"])[-1]
        for turn in range(ROUNDS + 1):
            for name, worker in workers.items():
                assert worker.stdin is not None
                worker.stdin.write("go\n")
                worker.stdin.flush()
                found: dict[str, float] = json.loads(_line(worker))
                if turn:
                    results[name].rounds.append(found)
        for name, worker in workers.items():
            rest, _ = worker.communicate()
            results[name].collector = json.loads(rest) if rest.strip() else None
        sent: Any = counted(url)
        for number, name in enumerate(TRACERS):
            if str(number) in sent:
                results[name].exported = sent[str(number)] / SPANS / (ROUNDS + 1)
    return results


def _line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline()


def table() -> str:
    """One row a tracer."""
    results = measure()
    base = results[BASE]
    lines = [
        "| a span with 4 attributes | in the traced thread | in the whole process | collector | exported |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, result in results.items():
        if not result.rounds:
            lines.append(f"| {name} | not measured: {result.missing} | | | |")
            continue
        cells = [f"{result.median(what) / 1e3:.2f} µs" for what in (THREAD, PROCESS)]
        if base.rounds:
            shares = (base.median(what) / result.median(what) for what in (THREAD, PROCESS))
            cells = [f"{cell} (1/{share:.1f})" for cell, share in zip(cells, shares)]
        collector = "" if result.collector is None else f"{result.collector / 1e3:.1f} µs"
        exported = "" if result.exported is None else f"{result.exported:.0%}"
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {collector} | {exported} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _work(*sys.argv[1:3])
    else:
        print(table())
