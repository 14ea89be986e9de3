"""Comparing an engine's steps with and without a feature, on a shared machine."""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from statistics import median

Measure = Callable[[Sequence[float]], float]


def compare(
    steps: Iterator[float],
    switch: Callable[[bool], None],
    seconds: float,
    measures: Sequence[Measure],
    *,
    skip: int,
    count: int,
) -> list[tuple[float, ...]]:
    """Switch on and off in turns of ``count`` steps for ``seconds``; a ratio for each turn and measure.

    :param steps: the seconds of a step, without end. A machine that gets slower or faster for a while does so
        for all parts of a ratio.
    :param skip: the number of steps after each switch that are ignored.
    """

    def turn(is_on: bool) -> list[float]:
        switch(is_on)
        for _ in range(skip + random.randrange(2)):  # random, so as not to coincide with other periodic work
            next(steps)
        return [next(steps) for _ in range(count)]

    found: list[tuple[float, ...]] = []
    end = time.monotonic() + seconds
    before = turn(False)
    while time.monotonic() < end:
        during, after = turn(True), turn(False)
        found.append(tuple(measure(during) / measure(before + after) for measure in measures))
        before = after
    return found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median between the bounds of its 95 % confidence interval: a median's are two of the values."""
    ordered, count = sorted(values), len(values)
    inside, rank = 1.0, 0
    while rank + 1 < count / 2:
        chance = 2 * math.comb(count, rank) / 2**count
        if inside - chance < 0.95:
            break
        inside, rank = inside - chance, rank + 1
    low = max(rank - 1, 0)
    return ordered[low], median(values), ordered[count - 1 - low]


def step_aside() -> None:
    """Lower this process's priority, outside the measurement: it runs only while a processor is idle."""
    with suppress(OSError):
        os.setsid()  # Linux with autogroups schedules by session
    with suppress(OSError):
        os.nice(19)
        if sys.platform == "linux":
            with open("/proc/self/autogroup", "w") as session:
                session.write("19")
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
