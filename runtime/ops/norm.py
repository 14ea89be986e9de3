"""Root mean square normalization."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.ops.base import Operator


class RMSNorm(Operator):
    """``x / rms(x) * weight`` over the last dimension, computed in float32.

    With ``residual``: adds ``x`` to it first, and returns (normalized sum, sum).
    """

    op_name = "rms_norm"

    def __init__(self, hidden_size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def compute(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return dispatch.rms_norm(x, self.weight, self.eps, residual)


class GemmaRMSNorm(RMSNorm):
    """``RMSNorm`` with ``1 + weight``, rounded once, at the end."""

    op_name = "gemma_rms_norm"

    def compute(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return dispatch.gemma_rms_norm(x, self.weight, self.eps, residual)
