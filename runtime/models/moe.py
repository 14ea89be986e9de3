"""A layer's experts: router, routed experts, and those that every token goes through."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from sgl_aspects.runtime.communicator import Communicator
from sgl_aspects.runtime.loader.model_config import MoEConfig
from sgl_aspects.runtime.models.decoder import GatedMLP
from sgl_aspects.runtime.ops import FusedExperts, TopKExperts


class Router(nn.Module):
    """One logit a token and expert. Small, and whole on each rank."""

    def __init__(self, hidden_size: int, moe: MoEConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.float32 = moe.float32_router
        self.weight = nn.Parameter(
            torch.empty(moe.num_experts, hidden_size, dtype=dtype), requires_grad=False
        )
        self.e_score_correction_bias = (
            nn.Parameter(torch.empty(moe.num_experts, dtype=torch.float32), requires_grad=False)
            if moe.has_correction_bias
            else None
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] → [tokens, experts]."""
        if self.float32:
            return F.linear(hidden.float(), self.weight.float())
        return F.linear(hidden, self.weight)


class MoEBlock(nn.Module):
    """In the place of an MLP."""

    def __init__(self, hidden_size: int, moe: MoEConfig, dtype: torch.dtype, tp: Communicator) -> None:
        super().__init__()
        self.tp = tp
        self.gate = Router(hidden_size, moe, dtype)
        self.topk = TopKExperts(moe)
        self.experts = FusedExperts(hidden_size, moe, dtype, tp)
        shared_size = moe.num_shared_experts * moe.intermediate_size
        self.shared_experts = (
            GatedMLP(hidden_size, shared_size, bias=False, dtype=dtype, tp=tp) if shared_size else None
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, experts = self.topk(self.gate(hidden), self.gate.e_score_correction_bias)
        output = self.tp.all_reduce(self.experts(hidden, weights, experts))
        return output if self.shared_experts is None else output + self.shared_experts(hidden)
