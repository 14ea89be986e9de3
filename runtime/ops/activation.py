"""Gated activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from sgl_aspects.runtime.ops.base import Operator


class SiluAndMul(Operator):
    """[..., 2 n] → [..., n]: ``silu(first half) * second half``."""

    def forward_native(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def forward_cuda(self, x: torch.Tensor) -> torch.Tensor:
        from sgl_aspects.runtime.ops import triton_kernels

        return triton_kernels.silu_and_mul(x)
