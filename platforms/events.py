"""Moments on a device's own timeline, so that traces carry device time without waiting for the device."""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class DeviceEvent(ABC):
    """One moment: recorded into the device's work queue, reached when the work before it is done."""

    @abstractmethod
    def record(self, stream: Any = None) -> None:
        """Mark the present end of ``stream`` (None: the current one). Recording again moves the mark."""

    @abstractmethod
    def query(self) -> bool:
        """True once the device has passed the mark. Never waits. False before ``record``."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""

    @abstractmethod
    def elapsed_ms(self, end: DeviceEvent) -> float:
        """Milliseconds on the device from this mark to ``end``, an event of the same kind.

        Raises RuntimeError if either is not recorded yet, or not reached yet.
        """

    def marker(self) -> Callable[[Any], object]:
        """``record`` for one stream, as direct as possible: called with each step."""
        return self.record

    def recorder(self) -> tuple[int, int, int] | None:
        """The addresses of two functions by which C code records the event, and the event for them.

        ``int record(event, stream)``, ``int elapsed(float *milliseconds, begin, end)``; 0: done. None: only
        the methods here can. The stream for it is the platform's ``stream_handle``.
        """
        return None

    def timer(self, end: DeviceEvent) -> Callable[[], float]:
        """``elapsed_ms(end)``, as direct as possible."""
        return functools.partial(self.elapsed_ms, end)


class ClockEvent(DeviceEvent):
    """A reading of the clock, for devices that work while the caller waits, like the CPU."""

    __slots__ = ("_time_ns",)

    def __init__(self) -> None:
        self._time_ns: int | None = None

    def record(self, stream: Any = None) -> None:
        self._time_ns = time.perf_counter_ns()

    def query(self) -> bool:
        return self._time_ns is not None

    def synchronize(self) -> None:
        """Nothing to wait for: a recorded moment has passed."""

    def elapsed_ms(self, end: DeviceEvent) -> float:
        if not isinstance(end, ClockEvent):
            raise TypeError(f"elapsed_ms takes another ClockEvent, not {type(end).__qualname__}")
        if self._time_ns is None or end._time_ns is None:
            which = "first" if self._time_ns is None else "end"
            raise RuntimeError(
                f"The {which} event was never recorded: call record() on both before elapsed_ms()."
            )
        return (end._time_ns - self._time_ns) / 1e6
