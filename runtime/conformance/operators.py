"""The runtime's operators as the platform runs them, against formulas in float64 on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sgl_aspects.runtime.conformance.check import Bench, check, require
from sgl_aspects.runtime.loader.model_config import RopeConfig
from sgl_aspects.runtime.ops import (
    Embedding,
    Linear,
    MergedLinear,
    Operator,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
)

#: The largest error, as a share of the largest value of the reference.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
_ROWS = (1, 3, 17)


def relative_error(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Infinite where the shape is another, or something is not finite."""
    if found.shape != reference.shape:
        return float("inf")
    difference = (found.detach().cpu().double() - reference).abs().max()
    error = float(difference / reference.abs().max().clamp_min(1e-30))
    return error if error == error else float("inf")  # NaN is no small error


def random_tensor(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """On the host, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)


def _compare(
    bench: Bench,
    operator: Callable[[torch.dtype], Operator],
    inputs: Callable[[torch.dtype, int], Sequence[torch.Tensor]],
    reference: Callable[..., Sequence[torch.Tensor]],
) -> str:
    """Run the operator on the device, in each type and with several numbers of rows.

    ``reference(operator's parameters, *inputs)`` gets all in float64, rounded to the type before.
    """
    worst = 0.0
    for dtype, tolerance in TOLERANCES.items():
        with bench.platform.inference_mode(), bench.device:
            made = operator(dtype)
            for number, parameter in enumerate(made.parameters()):
                parameter.data.copy_(random_tensor(*parameter.shape, dtype=dtype, seed=100 + number))
            parameters = [parameter.detach().cpu().double() for parameter in made.parameters()]
            made.prepare_weights()
        form = _form(made.rotary if isinstance(made, _Rotary) else made, dtype, bench.device)
        for rows in _ROWS:
            given = inputs(dtype, rows)
            with bench.platform.inference_mode():
                there = [tensor.to(bench.device) for tensor in given]
                output = made(*there)
            outputs = output if isinstance(output, tuple) else (output,)
            exact = [t.double() if t.is_floating_point() else t for t in given]
            expected = reference(parameters, *exact)
            for found, right in zip(outputs, expected, strict=True):
                require(found.dtype == dtype, form, f"an output of {dtype}", found.dtype)
                error = relative_error(found, right)
                require(
                    error <= tolerance,
                    form,
                    f"the float64 reference within {tolerance:g}, {dtype}, {rows} rows",
                    f"an error of {error:.2g}",
                )
                worst = max(worst, error / tolerance)
            for before, after in zip(given, there):
                require(
                    torch.equal(before, after.cpu()), form, "its inputs left as they were", "changed ones"
                )
    return f"{form}, error at most {100 * worst:.0f} % of what is allowed"


@check(
    "operators.silu_and_mul", write="forward_<key> of SiluAndMul", expects="silu(first half) * second half"
)
def silu_and_mul(bench: Bench) -> str:
    def reference(_: object, x: torch.Tensor) -> Sequence[torch.Tensor]:
        gate, up = x.chunk(2, dim=-1)
        return (gate / (1 + torch.exp(-gate)) * up,)

    return _compare(
        bench,
        lambda dtype: SiluAndMul(),
        lambda dtype, rows: [random_tensor(rows, 96, dtype=dtype, seed=rows)],
        reference,
    )


def _normalized(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@check("operators.rms_norm", write="forward_<key> of RMSNorm", expects="x / rms(x) * weight")
def rms_norm(bench: Bench) -> str:
    return _compare(
        bench,
        lambda dtype: RMSNorm(64, 1e-6, dtype),
        lambda dtype, rows: [random_tensor(rows, 64, dtype=dtype, seed=rows)],
        lambda parameters, x: (_normalized(parameters[0], x),),
    )


@check(
    "operators.rms_norm_residual",
    write="forward_<key> of RMSNorm",
    expects="(norm(x + residual), x + residual)",
)
def rms_norm_residual(bench: Bench) -> str:
    return _compare(
        bench,
        lambda dtype: RMSNorm(64, 1e-6, dtype),
        lambda dtype, rows: [
            random_tensor(rows, 64, dtype=dtype, seed=rows),
            random_tensor(rows, 64, dtype=dtype, seed=rows + 50),
        ],
        lambda parameters, x, residual: (_normalized(parameters[0], x + residual), x + residual),
    )


@check("operators.linear", write="forward_<key> of Linear", expects="x @ weight.T + bias")
def linear(bench: Bench) -> str:
    return _compare(
        bench,
        lambda dtype: Linear(48, 80, bias=True, dtype=dtype),
        lambda dtype, rows: [random_tensor(rows, 48, dtype=dtype, seed=rows)],
        lambda parameters, x: (x @ parameters[0].T + parameters[1],),
    )


@check("operators.merged_linear", write="forward_<key> of MergedLinear", expects="several linears as one")
def merged_linear(bench: Bench) -> str:
    return _compare(
        bench,
        lambda dtype: MergedLinear(48, {"q": 64, "k": 16, "v": 16}, bias=False, dtype=dtype),
        lambda dtype, rows: [random_tensor(rows, 48, dtype=dtype, seed=rows)],
        lambda parameters, x: (x @ parameters[0].T,),
    )


@check("operators.embedding", write="forward_<key> of Embedding", expects="rows of the weight")
def embedding(bench: Bench) -> str:
    return _compare(
        bench,
        lambda dtype: Embedding(100, 64, dtype),
        lambda dtype, rows: [torch.arange(rows) * 37 % 100],
        lambda parameters, ids: (parameters[0][ids],),
    )


def _form(operator: Operator, dtype: torch.dtype, device: torch.device) -> str:
    """The implementation that serves, by its id: a form of the operator's class, or a registered function."""
    return operator.chosen(dtype, device).impl_id


class _Rotary(Operator):
    """RotaryEmbedding with the look-up of the angles: tensors in, tensors out."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.rotary = RotaryEmbedding(RopeConfig(), 32, 256, dtype)

    def forward_native(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rotated: tuple[torch.Tensor, torch.Tensor] = self.rotary(query, key, self.rotary.angles(positions))
        return rotated


def _rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    angles = torch.outer(positions.double(), frequencies).unsqueeze(1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )


@check("operators.rotary", write="forward_<key> of RotaryEmbedding", expects="each pair turned by its angle")
def rotary(bench: Bench) -> str:
    return _compare(
        bench,
        _Rotary,
        lambda dtype, rows: [
            random_tensor(rows, 4, 32, dtype=dtype, seed=rows),
            random_tensor(rows, 2, 32, dtype=dtype, seed=rows + 50),
            torch.arange(rows) * 13 % 256,
        ],
        lambda _, query, key, positions: (_rotate(query, positions), _rotate(key, positions)),
    )
