"""Measuring on a shared machine."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil


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


def publish(page: str, file: Path | None) -> None:
    """Print a page, and write it if it is wanted in a file."""
    sys.stdout.write(page)
    if file is not None:
        file.write_text(page)


def signal_all(process_id: int, number: int) -> None:
    """Send a signal to a server's process and its children: one that waits is suspended, for it may spin."""
    main = psutil.Process(process_id)
    for process in (main, *main.children(recursive=True)):
        process.send_signal(number)


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
