"""The gated activation in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_aspects.runtime.dispatch.define import OPERATORS
from sgl_aspects.runtime.dispatch.triton import overlapping


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():  # the compiler writes kernels of its own
        return OPERATORS["silu_and_mul"].reference(x)  # type: ignore[no-any-return]
    size = x.shape[-1] // 2
    x = x.contiguous()
    output = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(size))
    _silu_and_mul[(output.numel() // size, triton.cdiv(size, block))](
        x, output, SIZE=size, BLOCK=block, **overlapping()
    )
    return output


@triton.jit
def _silu_and_mul(x, output, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(x + token * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + token * SIZE + columns, (active * up).to(output.dtype.element_ty), mask=inside)
