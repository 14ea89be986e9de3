"""The platform's figures of memory, against allocations of a known size in a fresh process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from sgl_aspects.conformance.check import Bench, NotApplicableError, check, require
from sgl_aspects.conformance.suite import call_in_processes
from sgl_aspects.platforms import current_platform

MIB = 2**20
BLOCK = 128 * MIB
#: Attempts: on a shared host the free memory changes by itself, so one good measurement is enough.
_ATTEMPTS = 5


@dataclass(frozen=True)
class Measured:
    """The figures of one measurement, in bytes."""

    free: int
    total: int
    device_total: int
    #: How much higher the peak was with the block, and how much lower after it.
    risen: float
    fallen: float
    #: The decrease of free memory with the block and the increase after it; for each attempt.
    taken: list[int]
    returned: list[int]


def measure() -> Measured:
    """Measure in a process of its own: a peak never falls, and this process's past would hide the block."""
    platform = current_platform
    device = platform.get_device(0)
    platform.set_device(device)
    torch.ones(1, device=device)  # makes the device's context, which is not part of the block
    peak_before = platform.get_current_memory_usage()
    free, total = platform.get_available_memory()
    taken: list[int] = []
    returned: list[int] = []
    peak_with_block = 0.0
    kept = []
    for number in range(_ATTEMPTS):
        before = platform.get_available_memory()[0]
        block = torch.ones(BLOCK, dtype=torch.uint8, device=device)
        platform.synchronize()
        during = platform.get_available_memory()[0]
        taken.append(before - during)
        if number == 0:
            peak_with_block = platform.get_current_memory_usage()
        if platform.shares_host_memory():
            # Systems keep freed memory for a while and hand it out again: each block comes on top.
            kept.append(block)
        del block
        platform.synchronize()
        platform.empty_cache()
        returned.append(platform.get_available_memory()[0] - during)
        if _is_block(taken[-1]) and (_is_block(returned[-1]) or kept):
            break
    fallen = peak_with_block - platform.get_current_memory_usage()
    device_total = platform.get_device_total_memory()
    return Measured(free, total, device_total, peak_with_block - peak_before, fallen, taken, returned)


def _is_block(size: float) -> bool:
    return 0.7 * BLOCK <= size <= 1.5 * BLOCK


@cache
def measured(bench: Bench) -> Measured:
    """Measure once for all the checks of a run."""
    answer: Measured = call_in_processes(measure, [()])[0]
    return answer


@check(write="get_available_memory", expects="(free, total) in bytes, free up to total")
def available(bench: Bench) -> str:
    found = measured(bench)
    is_right = 0 < found.free <= found.total and found.total > 64 * MIB
    require(is_right, "0 < free <= total, in bytes", f"free {found.free}, total {found.total}")
    return f"{found.free / MIB:.0f} of {found.total / MIB:.0f} MiB free"


@check(write="get_device_total_memory", expects="the total of get_available_memory")
def total(bench: Bench) -> str:
    found = measured(bench)
    is_near = abs(found.device_total - found.total) <= 0.05 * found.total
    require(is_near, f"{found.total} bytes, as in get_available_memory, within 5 %", found.device_total)
    return f"{found.device_total / MIB:.0f} MiB"


@check(write="get_available_memory", expects="free memory to fall as much as is allocated")
def allocating(bench: Bench) -> str:
    taken = _require_block(measured(bench).taken, "less free with it")
    return f"{taken / MIB:.0f} MiB taken by a block of {BLOCK // MIB}"


@check(write="empty_cache", expects="freed memory to be given back after empty_cache")
def releasing(bench: Bench) -> str:
    if bench.platform.shares_host_memory():
        raise NotApplicableError("the host's memory, which the system releases at any time")
    returned = _require_block(measured(bench).returned, "more free once it was freed and empty_cache called")
    return f"{returned / MIB:.0f} MiB given back"


@check(write="get_current_memory_usage", expects="a peak that rises with use and never falls")
def peak(bench: Bench) -> str:
    found = measured(bench)
    expected = f"a peak about {BLOCK} bytes higher with a block of that size"
    require(0.9 * BLOCK <= found.risen <= 1.6 * BLOCK, expected, f"{found.risen:.0f} bytes higher")
    require(found.fallen <= 0.1 * BLOCK, "the same peak afterwards", f"{found.fallen:.0f} bytes less")
    return f"{found.risen / MIB:.0f} MiB higher with a block of {BLOCK // MIB}"


def _require_block(sizes: list[int], what: str) -> int:
    """Return the best attempt, which is about the block's size."""
    size = min(sizes, key=lambda size: abs(size - BLOCK))
    found = f"{size} at best, of {_ATTEMPTS} attempts"
    require(_is_block(size), f"about {BLOCK} bytes {what}", found, "get_available_memory")
    return size
