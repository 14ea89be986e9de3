"""The time of one decode step's observers in the scheduler's thread, without the weaving's calls.

    python -m benchmarks.steps [--sizes 1 16 64] [--steps 300]

The engine's objects are fakes. "warm": one step after the other in a tight loop, whole steps. "evicted":
before each observer a buffer of 64 MB is walked through, as a model does that runs in this processor's
caches; each enter and exit is timed alone, less the same timing of an empty function. A live engine lies
between the two: with its model on another device only the engine's own work is in the caches.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from sgl_aspects.engines import EMBEDDED
from sgl_aspects.runtime.core import ForwardMode
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.forward import ForwardObserver
from sgl_aspects.tracing.observers.steps import StepObserver
from sgl_aspects.tracing.options import DEFAULTS
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.ring_recorder import RingRecorder

LEVELS = (1, 2, 3)
EVICTED_BYTES = 64 << 20


class _Event:
    """A platform's events: here, of a device that is always done."""

    def marker(self) -> Callable[[Any], None]:
        return lambda stream: None

    def recorder(self) -> None: ...

    def timer(self, end: _Event) -> Callable[[], float]:
        return lambda: 1.0


class Stage:
    """One scheduler with its observers, and a batch that decodes. ``calls``: those of one step, in order."""

    def __init__(self, folder: str, size: int) -> None:
        self.recorder = RingRecorder(folder)
        self.recorder.open()
        trackers = Trackers.of(EMBEDDED, self.recorder, DEFAULTS)
        found = [*StepObserver(trackers).observations(), *ForwardObserver(trackers).observations()]
        self._observers = {each.role: each for each in found}
        reqs = [SimpleNamespace(rid=f"r{number}", output_ids=[]) for number in range(size)]
        for req in reqs:
            trackers.requests.resume(trackers.requests.queued(req.rid), 1)
        cache = SimpleNamespace(total_size=1000, available_size=lambda: 500)
        scheduler = SimpleNamespace(waiting=[], running=reqs, kv_cache=cache)
        platform = SimpleNamespace(device_name="cpu", create_event=_Event)
        platform.current_stream, platform.stream_handle = lambda: None, lambda stream: 0
        runner = SimpleNamespace(platform=platform)
        batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, reqs=reqs, step_id=1, num_tokens=size)
        result = object()
        run = ("run_batch", (scheduler, batch), result)
        process = ("process_batch_result", (scheduler, batch, result), None)
        self._nested = [("forward", (runner, batch), None)]
        self._around = [("schedule", (scheduler,), batch), run, process]

    def calls(self, level: int) -> list[tuple[str, Callable[[Any], Any]]]:
        """Return each enter and exit in order; tokens are passed through a dictionary."""
        found: list[tuple[str, Callable[[Any], Any]]] = []
        for role, args, result in self._around:
            found.append((f"{role} enter", self._enter(role, args)))
            if role == "run_batch" and level >= 3:
                for inner, inner_args, inner_result in self._nested:
                    found.append((f"{inner} enter", self._enter(inner, inner_args)))
                    found.append((f"{inner} exit", self._exit(inner, inner_result)))
            found.append((f"{role} exit", self._exit(role, result)))
        return found

    def _enter(self, role: str, args: Any) -> Callable[[Any], Any]:
        enter = self._observers[role].enter

        def call(tokens: Any) -> None:
            tokens[role] = enter(args, {})

        return call

    def _exit(self, role: str, result: Any) -> Callable[[Any], Any]:
        exit = self._observers[role].exit
        return lambda tokens: exit(tokens[role], result, None)

    def be(self, level: int) -> None:
        """The level, and a collector that has taken everything."""
        words = self.recorder.steps.words
        words[layout.WORD_LEVEL] = level
        words[layout.WORD_TAKEN] = self.recorder._last


def warm(stage: Stage, level: int, steps: int) -> float:
    """Microseconds of a whole step, the best of several turns."""
    calls, turns = [call for _, call in stage.calls(level)], []
    for _ in range(7):
        stage.be(level)
        turns.append(_whole(calls, steps))
    return min(turns) - _whole([lambda tokens: None] * len(calls), steps)


def _whole(calls: list[Callable[[Any], Any]], steps: int) -> float:
    tokens: dict[str, Any] = {}
    before = time.perf_counter_ns()
    for _ in range(steps):
        for call in calls:
            call(tokens)
    return (time.perf_counter_ns() - before) / steps / 1000


def evicted(stage: Stage, level: int, steps: int) -> dict[str, float]:
    """Median microseconds of each enter and exit."""
    buffer = torch.zeros(EVICTED_BYTES // 8, dtype=torch.int64)
    found: dict[str, list[int]] = {}
    tokens: dict[str, Any] = {}
    clock = time.perf_counter_ns
    calls: list[tuple[str, Callable[[Any], Any]]] = [*stage.calls(level), ("", lambda tokens: None)]
    for _ in range(steps):
        stage.be(level)
        for name, call in calls:
            buffer.add_(1)
            before = clock()
            call(tokens)
            found.setdefault(name, []).append(clock() - before)
    empty = statistics.median(found.pop(""))
    return {name: (statistics.median(times) - empty) / 1000 for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 16, 64], help="requests in a batch")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for size in given.sizes:
        for level in LEVELS:
            with tempfile.TemporaryDirectory(prefix="sgl-aspects-bench-", dir="/dev/shm") as folder:
                stage = Stage(folder, size)
                whole = warm(stage, level, 2000)
                each = evicted(stage, level, given.steps)
                stage.recorder.close()
            print(f"batch of {size}, level {level}: warm {whole:.1f} µs, evicted {sum(each.values()):.1f} µs")
            if size == given.sizes[-1]:
                print("".join(f"    {name:<28}{cost:6.1f} µs\n" for name, cost in each.items()), end="")


if __name__ == "__main__":
    main()
