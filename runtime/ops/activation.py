"""The gated activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_aspects.runtime.dispatch.reference import dense
from sgl_aspects.runtime.ops.base import Operator


class SiluAndMul(Operator):
    """[..., 2 n] → [..., n]: ``silu(first half) * second half``."""

    def forward_native(self, x: Tensor) -> Tensor:
        return dense.silu_and_mul(x)

    def forward_cuda(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # the compiler writes kernels of its own
            return self.forward_native(x)
        from sgl_aspects.runtime.ops import triton_kernels

        return triton_kernels.silu_and_mul(x)

    def call_function(self, function: Any, x: Tensor) -> Any:
        return function(x)
