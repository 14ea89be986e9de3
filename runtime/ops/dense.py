"""Gated activations, look-ups, and products with weights."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.ops.base import Operator, parameter


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


class Embedding(Operator):
    op_name = "embedding"

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size, dtype=dtype)

    def compute(self, token_ids: Tensor) -> Tensor:
        """[tokens] → [tokens, hidden_size]."""
        return dispatch.embedding(token_ids, self.weight)


class Linear(Operator):
    """``x @ weight.T + bias`` with weight [out_features, in_features]."""

    op_name = "linear"

    bias: nn.Parameter | None
    #: True if a weight of fewer bits would change the model's behaviour.
    keeps_precision: ClassVar[bool] = False
    #: Of a weight that was quantized: ``apply(layer, x, bias)`` computes with it.
    quant_method: Any = None

    def __init__(
        self, in_features: int, out_features: int, dtype: torch.dtype, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=dtype)
        self.bias = parameter(out_features, dtype=dtype) if bias else None
        #: True where another operator uses the same weight, as with tied embeddings.
        self.shares_weight = False
        self._packed: Tensor | None = None

    def compute(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features]."""
        if self.quant_method is not None:
            quantized: Tensor = self.quant_method.apply(self, x, self.bias)
            return quantized
        return dispatch.linear(x, self.weight, self.bias, self._packed)

    def prepare_weights(self) -> None:
        """Pack the weight for the implementation; free the plain one if nothing shares it."""
        super().prepare_weights()
        if self.quant_method is not None:
            return
        prepare = dispatch.get_manager().select("linear", self.weight.dtype, self.weight.device).impl.prepare
        if prepare is None:
            return
        self._packed = prepare(self.weight.data)
        if self._packed is not None and not self.shares_weight:
            self.weight.data = self.weight.data.new_empty(0)
