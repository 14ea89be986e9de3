"""Microseconds of the aspects in one decode step of eight requests, without the weaving's calls.

The engine's objects are stand-ins, so that a step takes no time of its own: python -m benchmarks.steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

from sgl_aspects.engines import EMBEDDED
from sgl_aspects.runtime.scheduling.batch import ForwardMode
from sgl_aspects.tracing.aspects.forward import ForwardAspect
from sgl_aspects.tracing.aspects.scheduled import ScheduledRequest, ScheduledRequestAspect, SchedulerState
from sgl_aspects.tracing.aspects.step import StepAspect
from sgl_aspects.tracing.ring import format as ring_format
from sgl_aspects.tracing.ring.recorder import RingRecorder

LEVELS = (0, 1, 2, 3)
ROUNDS, STEPS = 15, 2000


class _Batch:
    def __init__(self, reqs: list[Any]) -> None:
        self.forward_mode = ForwardMode.DECODE
        self.reqs = reqs
        self.step_id = 1
        self.num_new_tokens = [1] * len(reqs)
        self.batch_size = self.num_tokens = len(reqs)


class _Event:
    """What a platform gives: here, of a device that is always done."""

    def record(self) -> None:
        """Now."""

    def query(self) -> bool:
        return True

    def elapsed_ms(self, end: _Event) -> float:
        return 1.0


class _Platform:
    device_name = "cpu"

    def is_capturing(self) -> bool:
        return False

    def create_event(self) -> _Event:
        return _Event()


class _Cache:
    total_size = 1000

    def available_size(self) -> int:
        return 500


class _Runner:
    platform = _Platform()


class _Scheduler:
    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.kv_cache = _Cache()


def measure() -> dict[int, float]:
    """Median microseconds a step, by level, beyond those of level 0, where nothing is recorded."""
    found: dict[int, list[float]] = {level: [] for level in LEVELS}
    with tempfile.TemporaryDirectory(prefix="sgl-aspects-bench-", dir="/dev/shm") as folder:
        recorder = RingRecorder(folder)
        recorder.open()
        state = SchedulerState(recorder)
        observers: dict[str, list[Any]] = {}
        for aspect in (
            ScheduledRequestAspect(recorder, EMBEDDED, state),
            StepAspect(recorder, EMBEDDED, state),
            ForwardAspect(recorder, EMBEDDED, state),
        ):
            for observation in aspect.observations():
                observers.setdefault(observation.role, []).append((observation.enter, observation.exit))
        reqs = [type("Req", (), {"rid": f"r{n}", "output_ids": []})() for n in range(8)]
        for number, req in enumerate(reqs):
            state.requests[req.rid] = ScheduledRequest(100 + number, 200 + number, 1)
        scheduler, batch, runner = _Scheduler(), _Batch(reqs), _Runner()

        def call(role: str, args: tuple[Any, ...], result: Any, inside: tuple[Any, ...] = ()) -> None:
            tokens = [enter(args, {}) for enter, _ in observers[role]]
            for inner in inside:
                call(*inner)
            for (_, exit), token in zip(observers[role], tokens):
                exit(token, result, None)

        inner = (("forward", (runner, batch), None), ("sample", (runner, None, batch), None))
        children = (
            ("schedule", (scheduler,), batch),
            ("run_batch", (scheduler, batch), None, inner),
            ("process_batch_result", (scheduler, batch, None), None),
        )
        for _ in range(ROUNDS):
            for level in LEVELS:
                recorder._words[ring_format.WORD_LEVEL] = level
                recorder._words[ring_format.WORD_TAKEN] = recorder._slots._last  # an attentive collector
                call("step", (scheduler,), None, children)
                before = time.thread_time_ns()
                for _ in range(STEPS):
                    call("step", (scheduler,), None, children)
                found[level].append((time.thread_time_ns() - before) / STEPS / 1000)
        recorder.close()
    off = statistics.median(found[0])
    return {level: statistics.median(values) - off for level, values in found.items() if level}


if __name__ == "__main__":
    print("\n".join(f"level {level}: {cost:.1f} µs a step" for level, cost in measure().items()))
