"""Accuracy and speed of each dispatched operator in each backend, on the current platform's device.

    python -m benchmarks.operators [--only OPERATOR ...]

Reference is plain PyTorch, "compiled" the same under torch.compile (where that takes one graph), default
is FlagGems, vendor any other implementation for the device. Errors are against the reference in
float64, as shares of the largest value. Times are medians over calls one after the other, launches
included.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sgl_aspects.conformance.operators import difference
from sgl_aspects.platforms import current_platform
from sgl_aspects.runtime.dispatch import ImplKind, OpImpl, get_manager
from sgl_aspects.runtime.dispatch.selection import Availability
from tests.support.operator_cases import flat, in_type

TOKENS = (16, 2048)
#: Operators whose reference is a library's, or reads the device.
NOT_COMPILED = ("linear", "topk", "fused_moe")


def inputs(op: str, tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Sizes of a model of some eight billion parameters; experts as in Qwen3's."""
    generator = torch.Generator(device=device).manual_seed(1)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).mul_(scale).to(dtype)

    def norm() -> dict[str, Any]:
        return {"x": random(tokens, 4096), "weight": random(4096), "residual": random(tokens, 4096)}

    pairs = 64
    frequencies = 10000.0 ** (-torch.arange(pairs, device=device).double() / pairs)
    angles = torch.outer(torch.arange(4096, device=device).double(), frequencies)
    turning = {
        "query": random(tokens, 32, 128),
        "key": random(tokens, 8, 128),
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
    }
    places = (torch.arange(tokens, device=device) * 37 + 5) % 4096
    logits = random(tokens, 128)
    weights, ids = logits.float().softmax(-1).topk(8)
    return {
        "silu_and_mul": lambda: {"x": random(tokens, 28672)},
        "gelu_and_mul": lambda: {"x": random(tokens, 28672)},
        "rms_norm": norm,
        "gemma_rms_norm": norm,
        "linear": lambda: {"x": random(tokens, 4096), "weight": random(4096, 4096, scale=0.02)},
        "rotary_embedding": lambda: {**turning, "positions": places},
        "mrotary_embedding": lambda: {
            **turning,
            "positions": torch.stack([places, places // 2, places // 3]),
            "sections": (24, 20, 20),
            "section_interleaved": True,
        },
        "topk": lambda: {"router_logits": logits, "k": 8},
        "fused_moe": lambda: {
            "x": random(tokens, 2048),
            "gate_up_weight": random(128, 2 * 768, 2048, scale=0.03),
            "down_weight": random(128, 2048, 768, scale=0.03),
            "topk_weights": weights,
            "topk_ids": ids,
        },
    }[op]()


#: Look-ups, variants of other operators, and those with a reference alone.
NOT_MEASURED = ("embedding", "grouped_topk", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")


def _subject(impl: OpImpl) -> str:
    if impl.impl_id.startswith("triton."):
        return "runtime's Triton"
    return "default" if impl.kind is ImplKind.DEFAULT else f"vendor:{impl.vendor}"


def error(function: Callable[..., Any], given: dict[str, Any], reference: Callable[..., Any]) -> float:
    """The largest difference from the reference in float64, as a share of the largest value."""
    exact = in_type(given, torch.float64)
    mine = {name: one.clone() if isinstance(one, torch.Tensor) else one for name, one in given.items()}
    found, wanted = flat(function(**mine)), flat(reference(**exact))
    return max(difference(a, b) for a, b in zip(found, wanted, strict=True) if a.is_floating_point())


def microseconds(function: Callable[..., Any], given: dict[str, Any]) -> float:
    for _ in range(5):
        function(**given)
    current_platform.synchronize()
    times = []
    for _ in range(7):
        start, end = current_platform.create_event(), current_platform.create_event()
        start.record()
        for _ in range(10):
            function(**given)
        end.record()
        end.synchronize()
        times.append(start.elapsed_ms(end) * 100)
    return statistics.median(times)


def measure(only: list[str] | None) -> Iterator[str]:
    """Yield the rows of a table as they come."""
    registry, availability = get_manager().registry, Availability()
    for op in registry.op_names():
        if op in NOT_MEASURED or (only and op not in only):
            continue
        reference = registry.spec(op).reference
        subjects: dict[str, Callable[..., Any]] = {"reference": reference}
        for impl in registry.impls(op):
            if impl.kind is not ImplKind.REFERENCE and availability[impl] is None:
                subjects[_subject(impl)] = impl.function
        if op not in NOT_COMPILED:
            subjects["compiled"] = torch.compile(reference, dynamic=False, fullgraph=True)
        for tokens in TOKENS:
            given = inputs(op, tokens, torch.bfloat16, current_platform.get_device(0))
            for name, function in subjects.items():
                try:
                    found = f"{error(function, given, reference):.1e} | {microseconds(function, given):.0f}"
                except Exception as failure:  # noqa: BLE001  # shown in its row; the others go on
                    found = f"{type(failure).__name__}: {failure} |"[:300]
                yield f"| `{op}` | {tokens} | {name} | {found} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators", description=__doc__)
    parser.add_argument("--only", nargs="*", help="these operators")
    arguments = parser.parse_args()
    print("| operator | tokens | implementation | error | µs |\n| --- | ---: | --- | ---: | ---: |")
    with torch.inference_mode():
        for row in measure(arguments.only):
            print(row, flush=True)


if __name__ == "__main__":
    main()
