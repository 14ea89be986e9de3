"""Root mean square normalization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sgl_aspects.runtime.dispatch.reference import dense
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

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        return dense.rms_norm(x, self.weight, self.eps, residual)

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():  # the compiler writes kernels of its own
            return self.forward_native(x, residual)
        from sgl_aspects.runtime.ops import triton_kernels

        return triton_kernels.rms_norm(x, self.weight, self.eps, residual)

    def call_function(self, function: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        return function(x, self.weight, self.eps, residual)
