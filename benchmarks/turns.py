"""Comparing settings on a machine that others disturb: in turns, again and again."""

from __future__ import annotations

import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

Setting = TypeVar("Setting")


def cycles(
    settings: Sequence[Setting], seconds: float, measure: Callable[[Setting], float]
) -> list[dict[Setting, float]]:
    """For so many seconds: cycles in which each setting is measured twice, and both are added up.

    The order is another one in each cycle, and goes forth and back: what makes the machine slower or faster
    in the meantime changes all settings alike.
    """
    found: list[dict[Setting, float]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        order = random.sample(settings, len(settings))
        first = {setting: measure(setting) for setting in order}
        found.append({setting: first[setting] + measure(setting) for setting in reversed(order)})
    return found


def ratios(found: Sequence[dict[Setting, float]], setting: Setting, base: Setting) -> list[float]:
    """Of each cycle."""
    return [cycle[setting] / cycle[base] for cycle in found]


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
    return ordered[low], statistics.median(values), ordered[count - 1 - low]


def more(values: Sequence[float]) -> str:
    """Ratios as per cents beyond 1."""
    low, middle, high = (100 * (value - 1) for value in interval(values))
    return f"{middle:+.2f} % ({low:+.2f} to {high:+.2f})"


def step_aside() -> None:
    """For a process that is no part of what is measured: its work waits for a processor that is free."""
    with suppress(OSError):
        os.setsid()  # where Linux shares the processors out by session, one of its own
    with suppress(OSError):
        os.nice(19)
        if sys.platform == "linux":
            with open("/proc/self/autogroup", "w") as session:
                session.write("19")
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
