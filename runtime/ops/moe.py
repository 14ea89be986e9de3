"""Mixture of experts: which experts a token goes to, and what they make of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from sgl_aspects.errors import UnsupportedCallError
from sgl_aspects.runtime.dispatch.reference.experts import fused_moe
from sgl_aspects.runtime.dispatch.types import ImplKind
from sgl_aspects.runtime.execution.communicator import Communicator
from sgl_aspects.runtime.loader.model_config import MoEConfig
from sgl_aspects.runtime.loader.weights import Target
from sgl_aspects.runtime.ops.base import Operator, parameter


class TopKExperts(Operator):
    """Router logits to each token's experts and their weights."""

    op_name = "topk"

    def __init__(self, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        # Groups of experts are no part of the operator: only the forms of this class know them.
        self.takes_functions = moe.num_groups == 1
        self._site.reset()

    def forward_native(self, logits: Tensor, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [tokens, experts] → weights (float32) and expert ids, each [tokens, experts_per_token]."""
        moe = self.moe
        logits = logits.float()
        scores = logits.softmax(dim=-1) if moe.scoring == "softmax" else logits.sigmoid()
        choice = scores if correction_bias is None else scores + correction_bias
        if moe.num_groups > 1:
            choice = self._in_best_groups(choice)
        experts = choice.topk(moe.experts_per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if moe.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * moe.scaling_factor, experts

    def call_function(self, function: Any, logits: Tensor, correction_bias: Tensor | None = None) -> Any:
        if correction_bias is not None:
            raise UnsupportedCallError("topk knows no correction bias")
        moe = self.moe
        weights, experts = function(logits, moe.experts_per_token, moe.normalize, moe.scoring)
        return weights * moe.scaling_factor, experts

    def _in_best_groups(self, choice: Tensor) -> Tensor:
        groups = choice.view(len(choice), self.moe.num_groups, -1)
        if self.moe.group_by_top2:
            quality = groups.topk(2, dim=-1).values.sum(dim=-1)
        else:
            quality = groups.amax(dim=-1)
        best = quality.topk(self.moe.topk_groups, dim=-1).indices
        others = torch.ones_like(quality, dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(others.unsqueeze(-1), float("-inf")).view_as(choice)


class FusedExperts(Operator):
    """Gated MLPs, as many as experts, in stacked weights; each rank has its share of every inner size."""

    op_name = "fused_moe"

    def __init__(self, hidden_size: int, moe: MoEConfig, dtype: torch.dtype, tp: Communicator) -> None:
        super().__init__()
        self._tp = tp
        size = tp.share(moe.intermediate_size, "the experts' inner size")
        self.gate_up = parameter(moe.num_experts, 2 * size, hidden_size, dtype=dtype)
        self.down = parameter(moe.num_experts, hidden_size, size, dtype=dtype)

    def forward_native(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [tokens, hidden], weights and experts [tokens, experts_per_token] → [tokens, hidden]."""
        return fused_moe(x, self.gate_up, self.down, weights, experts)

    def forward_cuda(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """All experts at once."""
        from sgl_aspects.runtime.ops import triton_experts

        return triton_experts.fused_experts(x, self.gate_up, self.down, weights, experts)

    def call_function(self, function: Any, x: Tensor, weights: Tensor, experts: Tensor) -> Any:
        return function(x, self.gate_up, self.down, weights, experts)

    @property
    def capturable(self) -> bool:
        """False where the reference serves: it asks on the host which experts a step needs."""
        return self.chosen(self.down.dtype, self.down.device).kind is not ImplKind.REFERENCE

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        rank, count = self._tp.rank, self._tp.world_size
        for expert in range(len(self.down)):
            gate, up = self.gate_up.data[expert].chunk(2)
            yield f"{prefix}{expert}.gate_proj.weight", Target(gate, 0, rank, count)
            yield f"{prefix}{expert}.up_proj.weight", Target(up, 0, rank, count)
            yield f"{prefix}{expert}.down_proj.weight", Target(self.down.data[expert], 1, rank, count)
