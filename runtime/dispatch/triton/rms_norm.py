"""Root mean square normalization, with the addition before it, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_aspects.runtime.dispatch.define import OPERATORS
from sgl_aspects.runtime.dispatch.triton import overlapping


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if torch.compiler.is_compiling():  # the compiler writes kernels of its own
        return OPERATORS["rms_norm"].reference(x, weight, eps, residual)  # type: ignore[no-any-return]
    size = x.shape[-1]
    x = x.contiguous()
    output = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    tensors = x, x if residual is None else residual.contiguous(), weight, output, total
    options = {"HAS_RESIDUAL": residual is not None, "num_warps": 4 if size <= 2048 else 8, **overlapping()}
    _rms_norm[(x.numel() // size,)](*tensors, eps, SIZE=size, BLOCK=triton.next_power_of_2(size), **options)
    return output if residual is None else (output, total)


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    output,
    total,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    exact = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        # Rounded as the sum that is handed on: both are of the same numbers.
        exact += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
        rounded = exact.to(total.dtype.element_ty)
        tl.store(total + places, rounded, mask=inside)
        exact = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 0) / SIZE + eps)
    tl.store(output + places, (exact * scale * factors).to(output.dtype.element_ty), mask=inside)
