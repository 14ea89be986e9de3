"""The part of a layer after attention: an MLP, or experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sgl_aspects.runtime.communicator import Communicator
from sgl_aspects.runtime.loader.model_config import MoEConfig
from sgl_aspects.runtime.ops import (
    FusedExperts,
    GeluAndMul,
    Linear,
    MergedLinear,
    Operator,
    RowParallelLinear,
    SiluAndMul,
    TopKExperts,
)
from sgl_aspects.runtime.ops.base import parameter

#: By the name that config.json has for it.
ACTIVATIONS: dict[str, type[Operator]] = {"silu": SiluAndMul, "gelu_pytorch_tanh": GeluAndMul}


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` with ``size`` inner numbers."""

    def __init__(
        self,
        hidden_size: int,
        size: int,
        dtype: torch.dtype,
        tp: Communicator,
        *,
        bias: bool = False,
        hidden_act: str = "silu",
    ) -> None:
        super().__init__()
        tp.share(size, "the inner size of an MLP")
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = MergedLinear(hidden_size, parts, dtype, tp, bias=bias)
        self.activation = ACTIVATIONS[hidden_act]()
        self.down_proj = RowParallelLinear(size, hidden_size, dtype, tp, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(self.activation(self.gate_up_proj(hidden)))
        return output


class Router(Linear):
    """One logit a token and expert. Small, and whole on each rank."""

    keeps_precision = True

    def __init__(self, hidden_size: int, moe: MoEConfig, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, moe.num_experts, torch.float32 if moe.float32_router else dtype)
        self.e_score_correction_bias = (
            parameter(moe.num_experts, dtype=torch.float32) if moe.has_correction_bias else None
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] → [tokens, experts]."""
        logits: Tensor = super().forward(hidden.to(self.weight.dtype))
        return logits


class MoEBlock(nn.Module):
    """Router, routed experts, and those that every token goes through."""

    def __init__(self, hidden_size: int, moe: MoEConfig, dtype: torch.dtype, tp: Communicator) -> None:
        super().__init__()
        self.tp = tp
        self.gate = Router(hidden_size, moe, dtype)
        self.topk = TopKExperts(moe)
        self.experts = FusedExperts(hidden_size, moe, dtype, tp)
        shared_size = moe.num_shared_experts * moe.intermediate_size
        self.shared_experts = GatedMLP(hidden_size, shared_size, dtype, tp) if shared_size else None

    def forward(self, hidden: Tensor) -> Tensor:
        weights, experts = self.topk(self.gate(hidden), self.gate.e_score_correction_bias)
        output = self.tp.all_reduce(self.experts(hidden, weights, experts))
        if self.shared_experts is None:
            return output
        shared: Tensor = self.shared_experts(hidden)
        return output + shared
