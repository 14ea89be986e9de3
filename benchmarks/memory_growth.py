"""Growth of a process's memory, apart from the noise of its allocator.

A process's private memory is read once a second. After the warm-up, in which caches fill, the readings
are cut into parts, whose upper edges depend little on each other; a straight line through them has a slope
and, by how far they lie from it, a standard error. The edge, without a part's two highest readings: memory
that is given back for a while and taken again moves a part's median, and seldom its edge; a leak lifts both.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

WARM_UP_SHARE = 0.35
_PARTS = 12
_PEAKS = 2  # readings of a part that may be above its edge
_MIB = 1 << 20


@dataclass(frozen=True)
class Growth:
    """MiB an hour, over this number of hours."""

    slope: float
    standard_error: float
    hours: float

    @property
    def surely(self) -> float:
        """MiB by which it has grown at least: noise reaches it once in forty runs."""
        return (self.slope - 2 * self.standard_error) * self.hours

    @classmethod
    def of(cls, readings: Sequence[int], seconds: float) -> Growth:
        """Compute it from readings in bytes, evenly spaced over this number of seconds."""
        size = len(readings) // _PARTS
        parts = [readings[i * size : (i + 1) * size] for i in range(_PARTS)]
        edges = [sorted(part)[-1 - _PEAKS] / _MIB for part in parts]
        hours = [(i + 0.5) * seconds / 3600 / _PARTS for i in range(_PARTS)]
        slope, start = statistics.linear_regression(hours, edges)
        squares = sum((found - start - slope * hour) ** 2 for hour, found in zip(hours, edges))
        spread = sum((hour - statistics.fmean(hours)) ** 2 for hour in hours)
        return cls(slope, (squares / (_PARTS - 2) / spread) ** 0.5, seconds / 3600)


@dataclass
class Watched:
    """One process. It must live until the end."""

    name: str
    process: psutil.Process
    readings: list[int] = field(default_factory=list)

    def read(self) -> None:
        self.readings.append(self.process.memory_full_info().uss)

    def growth(self, seconds: float) -> Growth:
        """Return the growth after the warm-up; ``seconds``: of all readings."""
        steady = self.readings[int(len(self.readings) * WARM_UP_SHARE) :]
        return Growth.of(steady, seconds * len(steady) / len(self.readings))

    def story(self) -> str:
        tenth = max(len(self.readings) // 10, 1)
        sizes = ", ".join(f"{size / _MIB:.1f}" for size in self.readings[::tenth])
        files, threads = self.process.num_fds(), self.process.num_threads()
        return f"{self.name}, MiB: {sizes}; {files} open files, {threads} threads"


async def watch(processes: Sequence[Watched], end: float) -> None:
    """Read them once a second, until ``end`` of the monotonic clock."""
    while time.monotonic() < end:
        for process in processes:
            process.read()
        await asyncio.sleep(1)
