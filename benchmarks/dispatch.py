"""The cost of dispatch: a resolved call against the implementation called directly, and against a peer's
call_op.

    python -m benchmarks.dispatch

The peer is a copy of the public design of its ``call_op``: each call reads the policy and its fingerprint,
looks the candidates up under a lock, notes which implementation was used, and packs the arguments. All
subjects call the same function in one process; rounds are interleaved, and figures are medians of rounds.
"""

from __future__ import annotations

import os
import statistics
import timeit
from collections.abc import Callable
from typing import Any

os.environ.setdefault("SGL_ASPECTS_OP_CONTROL", "off")

import torch

from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.dispatch.define import OPERATORS
from tests.support.dispatch_peers import CallOp

ROUNDS = 41
silu_and_mul = OPERATORS["silu_and_mul"].reference


def subjects(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """By name; the first is the direct call."""
    manager, peer = dispatch.get_manager(), CallOp([("reference", silu_and_mul)])
    return {
        "direct": lambda: silu_and_mul(x),
        "dispatched": lambda: dispatch.silu_and_mul(x),
        "call_op by name": lambda: manager.call_op("silu_and_mul", x),
        "the peer's call_op": lambda: peer(x),
    }


def measure(calls: dict[str, Callable[[], Any]], number: int) -> dict[str, float]:
    """Median microseconds a call."""
    timers = {name: timeit.Timer(call) for name, call in calls.items()}
    rounds: dict[str, list[float]] = {name: [] for name in timers}
    for turn in range(ROUNDS):
        names = list(timers)
        for name in names if turn % 2 else reversed(names):
            rounds[name].append(timers[name].timeit(number) / number * 1e6)
    return {name: statistics.median(values) for name, values in rounds.items()}


def main() -> None:
    print("| silu_and_mul of | subject | µs | ratio to direct |\n| --- | --- | --- | --- |")
    with torch.inference_mode():
        for shape, number in ((1, 1536), 2_000), ((16, 11008), 200):
            medians = measure(subjects(torch.randn(shape)), number)
            for name, value in medians.items():
                print(f"| {list(shape)} | {name} | {value:.2f} | {value / medians['direct']:.3f} |")


if __name__ == "__main__":
    main()
