"""The runtime's operators as the platform runs them, against formulas in float64 on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from sgl_aspects.conformance.check import Bench, BrokenPromiseError, check, described, require
from sgl_aspects.errors import UnsupportedCallError
from sgl_aspects.runtime.dispatch import Token, get_manager, policy_context
from sgl_aspects.runtime.loader.model_config import RopeConfig
from sgl_aspects.runtime.ops import Embedding, Linear, Operator, RMSNorm, RotaryEmbedding, SiluAndMul

#: The largest error, as a fraction of the largest value of the reference.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_ROWS = (1, 3, 17)


def random_tensor(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random numbers on the host, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference as a fraction of the largest wanted value; for integers the fraction that
    differs. Infinite for another shape, and if one is finite and the other is not.
    """
    if found.shape != wanted.shape:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    if not (found.is_floating_point() and wanted.is_floating_point()):
        return float((found != wanted).double().mean())
    found, wanted = found.detach().double(), wanted.detach().double()
    finite = wanted.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    found, wanted = found[finite], wanted[finite]
    if found.numel() == 0:
        return 0.0
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def require_close(
    found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, what: str, write: str = ""
) -> float:
    """Fail unless ``found`` is ``what``, ``right``; returns the error as a share of what the type allows."""
    require(found.dtype == dtype, f"an output of {dtype}", found.dtype, write)
    require(found.shape == right.shape, f"an output of shape {list(right.shape)}", list(found.shape), write)
    found, wanted = found.cpu(), right.isfinite()
    others = int((found.isfinite() != wanted).sum())
    require(others == 0, f"{int(wanted.sum())} finite numbers, {dtype}", f"{others} NaN or infinite", write)
    error, allowed = difference(found, right), TOLERANCES[dtype]
    require(error <= allowed, f"{what}, {dtype}, within {allowed:g}", f"an error of {error:.2g}", write)
    return error / allowed


def _compare(
    bench: Bench,
    op_name: str,
    operator: Callable[[torch.dtype], Operator],
    inputs: Callable[[torch.dtype, int], Sequence[torch.Tensor]],
    reference: Callable[..., Sequence[torch.Tensor]],
) -> str:
    """Run the operator on the device, in each type and with several numbers of rows.

    ``reference(operator's parameters, *inputs)`` gets all in float64, rounded to the type before.
    """
    worst, refused, manager = 0.0, "", get_manager()
    for dtype in TOLERANCES:
        with bench.platform.inference_mode(), bench.device:
            made = operator(dtype)
            for number, parameter in enumerate(made.parameters()):
                parameter.data.copy_(random_tensor(*parameter.shape, dtype=dtype, seed=100 + number))
            parameters = [parameter.detach().cpu().double() for parameter in made.parameters()]
            made.prepare_weights()
        form = manager.select(op_name, dtype, bench.device).impl.impl_id
        # Otherwise the next one, in the end the reference, would serve what it fails to.
        alone = ((op_name, (Token.parse(f"impl:{form}", op_name),)),)
        policy = replace(manager.policy, strict=True, per_op_order=alone)
        for rows in _ROWS:
            given = inputs(dtype, rows)
            exact = [t.double() if t.is_floating_point() else t for t in given]
            expected = reference(parameters, *exact)
            with bench.platform.inference_mode():
                there = [tensor.to(bench.device, copy=True) for tensor in given]
                try:
                    with policy_context(policy):
                        output = made(*there)
                except UnsupportedCallError:
                    output, refused = made(*there), ", which refused calls that another served"
                except Exception as error:
                    raise BrokenPromiseError("an output", described(error), form) from error
            outputs = output if isinstance(output, tuple) else (output,)
            kinds = ", ".join(type(one).__name__ for one in outputs)
            require(kinds == ", ".join(["Tensor"] * len(expected)), f"{len(expected)} × Tensor", kinds, form)
            for found, right in zip(outputs, expected, strict=True):
                used = require_close(found, right, dtype, f"the float64 reference, {rows} rows", form)
                worst = max(worst, used)
            for before, after in zip(given, there):
                is_same = torch.equal(before, after.cpu())
                require(is_same, "its inputs left as they were", "changed ones", form)
    return f"{form}{refused}, error at most {100 * worst:.0f} % of what is allowed"


# -- references in float64 --------------------------------------------------------------------------------


def gated(x: torch.Tensor) -> torch.Tensor:
    """[..., 2 n] → [..., n]: silu(first half) * second half."""
    gate, up = x.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim]: pairs (i, i + dim / 2) turned by the angles of their tokens' positions."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(positions.double(), frequencies).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )


# -- checks -------------------------------------------------------------------------------------------------


def _rows(*shapes: tuple[int, ...]) -> Callable[[torch.dtype, int], list[torch.Tensor]]:
    """Random inputs [rows, *shape], one for each shape."""
    return lambda dtype, rows: [
        random_tensor(rows, *shape, dtype=dtype, seed=rows + 50 * number)
        for number, shape in enumerate(shapes)
    ]


def _check(name: str, expects: str, *how: Any, of: str = "") -> None:
    """``how``: further arguments of :func:`_compare`; ``of``: the operator, if it is not ``name``."""
    write = f"an implementation of {of or name} (docs/ops.md)"
    check(name=name, write=write, expects=expects)(lambda bench: _compare(bench, of or name, *how))


_check(
    "silu_and_mul",
    "silu(first half) * second half",
    lambda dtype: SiluAndMul(),
    _rows((96,)),
    lambda _, x: [gated(x)],
)
_check(
    "rms_norm",
    "x / rms(x) * weight",
    lambda dtype: RMSNorm(64, 1e-6, dtype),
    _rows((64,)),
    lambda parameters, x: [normalized(x, *parameters)],
)
_check(
    "rms_norm_residual",
    "(norm(x + residual), x + residual)",
    lambda dtype: RMSNorm(64, 1e-6, dtype),
    _rows((64,), (64,)),
    lambda parameters, x, residual: [normalized(x + residual, *parameters), x + residual],
    of="rms_norm",
)
_check(
    "linear",
    "x @ weight.T + bias",
    lambda dtype: Linear(48, 80, bias=True, dtype=dtype),
    _rows((48,)),
    lambda parameters, x: [x @ parameters[0].T + parameters[1]],
)
_check(
    "embedding",
    "rows of the weight",
    lambda dtype: Embedding(100, 64, dtype),
    lambda dtype, rows: [torch.arange(rows) * 37 % 100],
    lambda parameters, ids: [parameters[0][ids]],
)
_check(
    "rotary",
    "each pair turned by its angle",
    lambda dtype: RotaryEmbedding(RopeConfig(), 32, 256, dtype),
    lambda dtype, rows: [*_rows((4, 32), (2, 32))(dtype, rows), torch.arange(rows) * 13 % 256],
    lambda _, query, key, positions: [rotated(query, positions), rotated(key, positions)],
    of="rotary_embedding",
)
