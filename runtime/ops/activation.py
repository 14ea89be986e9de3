"""The gated activations."""

from __future__ import annotations

from torch import Tensor

from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.ops.base import Operator


class SiluAndMul(Operator):
    op_name = "silu_and_mul"

    def compute(self, x: Tensor) -> Tensor:
        """[..., 2 n] → [..., n]."""
        return dispatch.silu_and_mul(x)


class GeluAndMul(Operator):
    op_name = "gelu_and_mul"

    def compute(self, x: Tensor) -> Tensor:
        """[..., 2 n] → [..., n], with the approximation by tanh."""
        return dispatch.gelu_and_mul(x)
