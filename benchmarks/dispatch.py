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
from torch import nn

from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.dispatch import ImplKind, OpImpl
from sgl_aspects.runtime.dispatch.define import OPERATORS
from sgl_aspects.runtime.dispatch.process import new_registry
from sgl_aspects.runtime.ops import SiluAndMul
from tests.support.dispatch_peers import CallOp

ROUNDS, NUMBER = 41, 2_000
silu_and_mul = OPERATORS["silu_and_mul"].reference


class PlainSiluAndMul(nn.Module):
    """The layer without dispatch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return silu_and_mul(x)  # type: ignore[no-any-return]


def subjects() -> dict[str, dict[str, Callable[[], Any]]]:
    """Group → name → call; the first of a group is the direct one."""
    small, middle = torch.randn(1, 1536), torch.randn(16, 11008)
    peer = CallOp([("reference", silu_and_mul)])
    plain, layer = PlainSiluAndMul(), SiluAndMul()
    manager = dispatch.get_manager()
    registry = new_registry()
    registry.register(
        OpImpl(
            "silu_and_mul",
            "vendor.other",
            ImplKind.VENDOR,
            silu_and_mul,
            vendor="other",
            supported_dtypes=frozenset({torch.float64}),
        )
    )
    site = dispatch.OpManager(registry).site("silu_and_mul")

    def guarded_call(x: torch.Tensor) -> Any:
        try:
            return site.run(x)
        except Exception as error:  # noqa: BLE001  # as the operators' functions do
            return site.recover(error, (x,), {})

    groups: dict[str, dict[str, Callable[[], Any]]] = {}
    for name, x in {"[1, 1536]": small, "[16, 11008]": middle}.items():
        groups[f"function, float32 {name}"] = {
            "direct": lambda x=x: silu_and_mul(x),
            "dispatched": lambda x=x: dispatch.silu_and_mul(x),
            "dispatched by type": lambda x=x: guarded_call(x),
            "call_op by name": lambda x=x: manager.call_op("silu_and_mul", x),
            "the peer's call_op": lambda x=x: peer(x),
        }
        groups[f"layer, float32 {name}"] = {
            "direct": lambda x=x: plain(x),
            "dispatched": lambda x=x: layer(x),
        }
    return groups


def nothing(x: Any) -> None:
    return None


def overheads() -> dict[str, Callable[[], Any]]:
    """Measure the same with an implementation that does nothing: the cost of the call alone."""
    registry = dispatch.OpRegistry()
    registry.define(dispatch.OperatorSpec("nothing", nothing))
    manager = dispatch.OpManager(registry)
    peer = CallOp([("reference", nothing)])
    return {
        "direct": lambda: nothing(1),
        "dispatched by name": lambda: manager.call_op("nothing", 1),
        "the peer's call_op": lambda: peer(1),
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
    print("| call | subject | µs | ratio to direct |\n| --- | --- | --- | --- |")
    with torch.inference_mode():
        for group, calls in subjects().items():
            medians = measure(calls, NUMBER if "1536" in group else 200)
            for name, value in medians.items():
                print(f"| {group} | {name} | {value:.2f} | {value / medians['direct']:.3f} |")
    medians = measure(overheads(), 20_000)
    for name, value in medians.items():
        print(
            f"| a function that does nothing | {name} | {value:.3f} | +{value - medians['direct']:.3f} µs |"
        )


if __name__ == "__main__":
    main()
