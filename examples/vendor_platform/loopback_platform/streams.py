"""Streams and events. A stream is a thread that works off a queue; an event is a mark in the queue."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sgl_aspects.platforms import DeviceEvent


class LoopbackStream:
    """Does what is submitted, in order. Tensor work is done by the caller, before its mark is queued."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        if self._thread is None or not self._thread.is_alive():  # never started, or left behind by a fork
            self._thread = threading.Thread(target=self._run, name="loopback stream", daemon=True)
            self._thread.start()

    def synchronize(self) -> None:
        done = threading.Event()
        self.submit(done.set)
        done.wait()

    def _run(self) -> None:
        while True:
            self._work.get()()


_default_stream = LoopbackStream()
_current = threading.local()


def current_stream() -> LoopbackStream:
    """The present one of this thread."""
    return getattr(_current, "stream", _default_stream)


@contextmanager
def use_stream(stream: LoopbackStream) -> Iterator[None]:
    before = current_stream()
    _current.stream = stream
    try:
        yield
    finally:
        _current.stream = before
        stream.synchronize()


class _Mark:
    def __init__(self) -> None:
        # The device's clock: all work before the mark is done by now.
        self.time_ns = time.perf_counter_ns()
        self.reached = threading.Event()


class LoopbackEvent(DeviceEvent):
    def __init__(self) -> None:
        self._mark: _Mark | None = None

    def record(self, stream: LoopbackStream | None = None) -> None:
        self._mark = mark = _Mark()
        (stream or current_stream()).submit(mark.reached.set)

    def query(self) -> bool:
        return self._mark is not None and self._mark.reached.is_set()

    def synchronize(self) -> None:
        if self._mark is not None:
            self._mark.reached.wait()

    def elapsed_ms(self, end: DeviceEvent) -> float:
        if not isinstance(end, LoopbackEvent):
            raise TypeError(f"elapsed_ms takes another LoopbackEvent, not {type(end).__qualname__}")
        if not (self.query() and end.query()) or self._mark is None or end._mark is None:
            raise RuntimeError("both events must be recorded and reached: call record(), then synchronize()")
        return (end._mark.time_ns - self._mark.time_ns) / 1e6
