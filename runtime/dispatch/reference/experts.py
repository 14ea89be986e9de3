"""References: choosing experts, and running them."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor


def topk(
    router_logits: Tensor, k: int, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """router_logits [tokens, experts] → weights [tokens, k] in float32 and ids [tokens, k] in int64.

    The k most likely experts of each token, best first; ``renormalize`` makes their weights sum to 1.
    ``scoring`` is "softmax" or "sigmoid".
    """
    exact = router_logits if router_logits.dtype == torch.float64 else router_logits.float()
    if scoring == "softmax":
        scores = exact.softmax(-1)
    elif scoring == "sigmoid":
        scores = exact.sigmoid()
    else:
        raise ValueError(f'scoring={scoring!r}: choose "softmax" or "sigmoid"')
    weights, ids = scores.topk(k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


def fused_moe(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
) -> Tensor:
    """The gated MLPs of each token's experts, weighted and summed: one expert after the other.

    x [tokens, hidden]; gate_up_weight [experts, 2 inner, hidden]; down_weight [experts, hidden, inner];
    topk_weights and topk_ids [tokens, k]. ``activation`` is "silu" or "gelu" (tanh). Returns like x.
    """
    if activation not in ("silu", "gelu"):
        raise ValueError(f'activation={activation!r}: choose "silu" or "gelu"')
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    output = torch.zeros(x.shape, dtype=exact, device=x.device)
    # An id that is no expert's, as engines write it for padding, adds nothing.
    experts = list(range(len(gate_up_weight)))
    if not torch.compiler.is_compiling():  # which may not ask what is chosen
        experts = sorted(set(experts).intersection(topk_ids.flatten().tolist()))
    for expert in experts:
        tokens, place = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], gate_up_weight[expert]).chunk(2, dim=-1)
        inner = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        result = F.linear(inner, down_weight[expert]).to(exact)
        output.index_add_(0, tokens, result * topk_weights[tokens, place, None].to(exact))
    return output.to(x.dtype)
