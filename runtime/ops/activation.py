"""The gated activation."""

from __future__ import annotations

from torch import Tensor

from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.ops.base import Operator


class SiluAndMul(Operator):
    def compute(self, x: Tensor) -> Tensor:
        """[..., 2 n] → [..., n]."""
        return dispatch.silu_and_mul(x)
