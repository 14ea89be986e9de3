"""Mixture of experts: choosing each token's experts, and running them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.communicator import Communicator
from sgl_aspects.runtime.loader.model_config import MoEConfig
from sgl_aspects.runtime.loader.weights import Target
from sgl_aspects.runtime.ops.base import Operator, parameter


class TopKExperts(Operator):
    """Router logits to each token's experts and their weights; in groups by ``grouped_topk``."""

    op_name = "topk"

    def __init__(self, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        if moe.num_groups > 1 or moe.has_correction_bias:
            self.op_name = "grouped_topk"

    def compute(self, logits: Tensor, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """logits [tokens, experts] → weights (float32) and expert ids, each [tokens, experts_per_token]."""
        moe = self.moe
        if self.op_name == "topk":
            weights, experts = dispatch.topk(logits, moe.experts_per_token, moe.normalize, moe.scoring)
        else:
            weights, experts = dispatch.grouped_topk(
                logits,
                moe.experts_per_token,
                moe.num_groups,
                moe.topk_groups,
                correction_bias,
                moe.group_by_top2,
                moe.normalize,
                moe.scoring,
            )
        return weights * moe.scaling_factor, experts


class FusedExperts(Operator):
    """The experts' gated MLPs in stacked weights; each rank has its share of every inner size."""

    op_name = "fused_moe"

    def __init__(self, hidden_size: int, moe: MoEConfig, dtype: torch.dtype, tp: Communicator) -> None:
        super().__init__()
        self._tp = tp
        size = tp.share(moe.intermediate_size, "the experts' inner size")
        self.gate_up = parameter(moe.num_experts, 2 * size, hidden_size, dtype=dtype)
        self.down = parameter(moe.num_experts, hidden_size, size, dtype=dtype)

    def compute(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [tokens, hidden], weights and experts [tokens, experts_per_token] → [tokens, hidden]."""
        return dispatch.fused_moe(x, self.gate_up, self.down, weights, experts)

    @property
    def capturable(self) -> bool:
        """False where the reference runs: it reads on the host which experts a step needs."""
        impl = dispatch.get_manager().select("fused_moe", self.down.dtype, self.down.device).impl
        return impl.kind is not dispatch.ImplKind.REFERENCE

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        rank, count = self._tp.rank, self._tp.world_size
        for expert in range(len(self.down)):
            gate, up = self.gate_up.data[expert].chunk(2)
            yield f"{prefix}{expert}.gate_proj.weight", Target(gate, 0, rank, count)
            yield f"{prefix}{expert}.up_proj.weight", Target(up, 0, rank, count)
            yield f"{prefix}{expert}.down_proj.weight", Target(self.down.data[expert], 1, rank, count)
