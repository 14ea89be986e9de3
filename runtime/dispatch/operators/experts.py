"""Choosing experts, and running them."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from sgl_aspects.runtime.dispatch.define import operator


@operator()
def topk(
    router_logits: Tensor, k: int, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """router_logits [tokens, experts] → weights [tokens, k] in float32 and ids [tokens, k] in int64.

    The k most likely experts of each token, best first; ``renormalize`` makes their weights sum to 1.
    ``scoring`` is "softmax" or "sigmoid".
    """
    scores = _scores(router_logits, scoring)
    weights, ids = scores.topk(k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


@operator()
def grouped_topk(
    router_logits: Tensor,
    k: int,
    num_groups: int = 1,
    topk_groups: int = 1,
    correction_bias: Tensor | None = None,
    group_by_top2: bool = False,
    renormalize: bool = True,
    scoring: str = "softmax",
) -> tuple[Tensor, Tensor]:
    """Like :func:`topk`, with experts from the best ``topk_groups`` of ``num_groups`` groups only.

    ``correction_bias`` [experts] is added to the scores to choose by, not to the weights. A group is as good
    as its best expert, or as the sum of its best two where ``group_by_top2``.
    """
    scores = _scores(router_logits, scoring)
    choice = scores if correction_bias is None else scores + correction_bias
    if num_groups > 1:
        groups = choice.view(len(choice), num_groups, choice.shape[-1] // num_groups)
        if group_by_top2:
            quality = groups.topk(2, dim=-1).values.sum(dim=-1)
        else:
            quality = groups.amax(dim=-1)
        best = quality.topk(topk_groups, dim=-1).indices
        others = torch.ones_like(quality, dtype=torch.bool).scatter_(1, best, False)
        choice = groups.masked_fill(others.unsqueeze(-1), float("-inf")).view_as(choice)
    ids = choice.topk(k, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights, ids


def _scores(router_logits: Tensor, scoring: str) -> Tensor:
    """Return scores in float32 at least."""
    exact = router_logits if router_logits.dtype == torch.float64 else router_logits.float()
    if scoring == "softmax":
        return exact.softmax(-1)
    if scoring == "sigmoid":
        return exact.sigmoid()
    raise ValueError(f'scoring={scoring!r}: choose "softmax" or "sigmoid"')


@operator()
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
    # Ids outside the experts, which engines use for padding, add nothing.
    experts = list(range(len(gate_up_weight)))
    if not torch.compiler.is_compiling():  # which must not read values on the host
        experts = sorted(set(experts).intersection(topk_ids.flatten().tolist()))
    for expert in experts:
        tokens, place = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[tokens], gate_up_weight[expert]).chunk(2, dim=-1)
        inner = (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        result = F.linear(inner, down_weight[expert]).to(exact)
        output.index_add_(0, tokens, result * topk_weights[tokens, place, None].to(exact))
    return output.to(x.dtype)
