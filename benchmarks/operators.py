"""Accuracy and speed of each dispatched operator in each backend, on the current platform's device.

    python -m benchmarks.operators [--write FILE] [--seconds N]

Reference is plain PyTorch, "compiled" the same under torch.compile (where that takes one graph), default
is FlagGems, vendor any other implementation for the device. Errors are against the reference in
float64, as shares of the largest value. Times are medians over calls one after the other, launches
included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sgl_aspects.platforms import current_platform
from sgl_aspects.runtime.dispatch import ImplKind, OpImpl, get_manager
from sgl_aspects.runtime.dispatch.selection import Availability
from sgl_aspects.runtime.dispatch.shadow.watching import difference

TOKENS = (16, 2048)
#: Operators whose reference is not compiled, and why.
NOT_COMPILED = {
    "linear": "a library's",
    "topk": "a library's",
    "fused_moe": "reads the device",
    "chunk_gated_delta_rule": "a loop",
    "fused_recurrent_gated_delta_rule": "a loop",
}


def inputs(op: str, tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Sizes of a model of some eight billion parameters; experts and linear attention as in Qwen3's."""
    generator = torch.Generator(device=device).manual_seed(1)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).mul_(scale).to(dtype)

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
    delta_tokens = 1 if tokens == TOKENS[0] else tokens
    batch = 16 if tokens == TOKENS[0] else 1
    delta = {
        "query": random(batch, delta_tokens, 16, 128),
        "key": random(batch, delta_tokens, 16, 128),
        "value": random(batch, delta_tokens, 32, 128),
        "g": -random(batch, delta_tokens, 32, scale=0.1).abs().float(),
        "beta": random(batch, delta_tokens, 32).sigmoid(),
        "use_qk_l2norm": True,
    }
    state = random(batch, 32, 128, 128, scale=0.1).float()
    logits = random(tokens, 128)
    weights, ids = logits.float().softmax(-1).topk(8)
    return {
        "silu_and_mul": lambda: {"x": random(tokens, 28672)},
        "gelu_and_mul": lambda: {"x": random(tokens, 28672)},
        "rms_norm": lambda: {
            "x": random(tokens, 4096),
            "weight": random(4096),
            "residual": random(tokens, 4096),
        },
        "gemma_rms_norm": lambda: {
            "x": random(tokens, 4096),
            "weight": random(4096),
            "residual": random(tokens, 4096),
        },
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
        "chunk_gated_delta_rule": lambda: {**delta, "initial_state": state},
        "fused_recurrent_gated_delta_rule": lambda: {**delta, "state": state},
    }[op]()


#: Look-ups and variants of other operators.
NOT_MEASURED = ("embedding", "grouped_topk")


def _subject(impl: OpImpl) -> str:
    if impl.impl_id.startswith("triton."):
        return "runtime's Triton"
    return "default" if impl.kind is ImplKind.DEFAULT else f"vendor:{impl.vendor}"


def copied(given: dict[str, Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return (
            value.to(dtype, copy=True) if dtype is not None and value.is_floating_point() else value.clone()
        )

    return {name: copy(value) for name, value in given.items()}


def error(function: Callable[..., Any], given: dict[str, Any], reference: Callable[..., Any]) -> float:
    mine, exact = copied(given), copied(given, torch.float64)
    found, wanted = function(**mine), reference(**exact)
    found = [found] if isinstance(found, torch.Tensor) else list(found)
    wanted = [wanted] if isinstance(wanted, torch.Tensor) else list(wanted)
    if "state" in given:
        found, wanted = [*found, mine["state"]], [*wanted, exact["state"]]
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


def measure(seconds: float, only: list[str] | None = None, compiles: bool = True) -> list[dict[str, Any]]:
    """Return the rows, also printed as they come; stops before the time limit."""
    manager, availability = get_manager(), Availability()
    device = current_platform.get_device(0)
    dtype = torch.bfloat16
    rows = []
    deadline = time.monotonic() + seconds
    for op in manager.registry.op_names():
        if op in NOT_MEASURED or (only and op not in only):
            continue
        reference = manager.registry.spec(op).reference
        subjects: dict[str, Callable[..., Any]] = {"reference": reference}
        for impl in manager.registry.impls(op):
            if impl.kind is not ImplKind.REFERENCE and availability[impl] is None:
                subjects[_subject(impl)] = impl.function
        if compiles and op not in NOT_COMPILED:
            subjects["compiled"] = torch.compile(reference, dynamic=False, fullgraph=True)
        for tokens in TOKENS:
            slow = op == "fused_recurrent_gated_delta_rule" and tokens != TOKENS[0]
            if time.monotonic() > deadline or slow:
                continue
            given = inputs(op, tokens, dtype, device)
            row: dict[str, Any] = {"op": op, "tokens": tokens}
            for name, function in subjects.items():
                try:
                    row[name] = [error(function, given, reference), microseconds(function, given)]
                except Exception as failure:  # noqa: BLE001  # shown in its row; the others go on
                    row[name] = f"{type(failure).__name__}: {failure}"[:300]
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row if name not in ("op", "tokens")))
    lines = [f"| operator | tokens | {' | '.join(f'{name}: error, µs' for name in names)} |"]
    lines.append("| --- " * (len(names) + 2) + "|")
    for row in rows:
        cells = []
        for name in names:
            absent = "none"
            if name == "compiled":
                absent = NOT_COMPILED.get(row["op"], "not requested")
            value = row.get(name, absent)
            cells.append(value if isinstance(value, str) else f"{value[0]:.1e}, {value[1]:.0f}")
        lines.append(f"| `{row['op']}` | {row['tokens']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators", description=__doc__)
    parser.add_argument("--write", type=Path, help="write the table to this file")
    parser.add_argument("--only", nargs="*", help="these operators")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled column out")
    parser.add_argument("--seconds", type=float, default=240.0)
    arguments = parser.parse_args()
    with torch.inference_mode():
        rows = measure(arguments.seconds, arguments.only, not arguments.no_compile)
    text = table(rows)
    sys.stdout.write(text + "\n")
    if arguments.write:
        arguments.write.write_text(text + "\n")


if __name__ == "__main__":
    main()
