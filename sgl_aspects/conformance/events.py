"""Events, against the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch

from sgl_aspects.conformance.check import Bench, check, if_declared, require
from sgl_aspects.platforms import DeviceEvent

#: Seconds of work to measure, long enough that the device's time and the host's differ little.
_BUSY_SECONDS = 0.06


def _events(bench: Bench) -> tuple[DeviceEvent, DeviceEvent]:
    create, needed = bench.platform.create_event, bench.platform.is_asynchronous()
    start = if_declared(create, "create_event is not written: no device time in traces", needed=needed)
    end = create()
    for event in (start, end):
        require(isinstance(event, DeviceEvent), "a DeviceEvent", type(event).__qualname__, "create_event")
    return start, end


def _work(bench: Bench, seconds: float) -> float:
    """Keep the device busy, waiting for each piece; returns the seconds."""
    square = torch.ones(256, 256, device=bench.device)
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        square = square @ square / 256
        bench.platform.synchronize()
    return time.perf_counter() - begin


@check(write="create_event", expects="an unrecorded event to report that")
def unrecorded(bench: Bench) -> str:
    start, end = _events(bench)
    require(not start.query(), "False before record()", True, "DeviceEvent.query")
    with suppress(RuntimeError):
        answer = f"{start.elapsed_ms(end)} ms"
        require(False, "RuntimeError where one was never recorded", answer, "DeviceEvent.elapsed_ms")
    return "query() is False, elapsed_ms() raises"


def _waited_for(bench: Bench, wait: Callable[[DeviceEvent], None]) -> str:
    rounds = 50
    for number in range(rounds):
        start, end = _events(bench)
        start.record()
        torch.ones(64, 64, device=bench.device).sum()
        end.record()
        wait(end)
        found = f"False, round {number}"
        require(end.query(), "query() to be True afterwards", found)
        require(start.query(), "an earlier event to be reached too", found, "DeviceEvent.query")
    return f"{rounds} of {rounds}"


@check(write="DeviceEvent.synchronize", expects="a waited-for event to be reached")
def reached(bench: Bench) -> str:
    return _waited_for(bench, lambda event: event.synchronize())


@check(write="synchronize", expects="synchronize() to wait for all events before it")
def synchronize(bench: Bench) -> str:
    return _waited_for(bench, lambda event: bench.platform.synchronize())


@check(write="DeviceEvent.elapsed_ms", expects="milliseconds, as the host's clock has them")
def elapsed(bench: Bench) -> str:
    _work(bench, 0.01)
    start, end = _events(bench)
    bench.platform.synchronize()
    begin = time.perf_counter()
    start.record()
    work_ms = _work(bench, _BUSY_SECONDS) * 1e3
    end.record()
    bench.platform.synchronize()
    host_ms = (time.perf_counter() - begin) * 1e3  # more than the work, where a busy machine stopped a thread
    device_ms = start.elapsed_ms(end)
    is_near = 0.5 * work_ms <= device_ms <= 1.5 * host_ms + 20
    require(is_near, f"about {host_ms:.1f} ms, the host's time", f"{device_ms} ms")
    return f"{device_ms:.1f} ms, the host's clock {host_ms:.1f}"


@check(write="DeviceEvent.record", expects="recording again to move the mark")
def again(bench: Bench) -> str:
    found = 0.0
    for _ in range(3):  # a machine that stops this thread while it waits hides the fault in that round
        start, end = _events(bench)
        start.record()
        work_ms = _work(bench, _BUSY_SECONDS) * 1e3
        begin = time.perf_counter()
        start.record()
        end.record()
        bench.platform.synchronize()
        host_ms = (time.perf_counter() - begin) * 1e3
        found = start.elapsed_ms(end)
        require(0 <= found < host_ms + 0.8 * work_ms, "the time since the second record()", found)
    return f"{found:.3f} ms"
