"""Root mean square normalization."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from sgl_aspects.runtime.ops.base import Operator


class RMSNorm(Operator):
    """``x / rms(x) * weight`` over the last dimension, computed in float32.

    With ``residual``: adds ``x`` to it first, and returns (normalized sum, sum).
    """

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward_native(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        total = x + residual
        return F.rms_norm(total, self.weight.shape, self.weight, self.eps), total

    def forward_cuda(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        from sgl_aspects.runtime.ops import triton_kernels

        return triton_kernels.rms_norm(x, self.weight, self.eps, residual)
