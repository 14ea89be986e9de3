"""Sparse attention in plain PyTorch: each token reads only those with the best indexer scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sgl_aspects.runtime.attention.base import Attention, IndexerInputs
    from sgl_aspects.runtime.core import ForwardBatch
    from sgl_aspects.runtime.kv_cache import ReqToTokenPool


def sparse_attention(
    kv_pool: Any,
    req_to_token_pool: ReqToTokenPool,
    query: Tensor,
    index: IndexerInputs,
    layer: Attention,
    batch: ForwardBatch,
) -> Tensor:
    """query [tokens, heads, head_dim] → [tokens, heads, v_head_dim]; this step's keys are in the pool.

    One request after the other; one key-value head, as compressed rows have.
    """
    keys, values = (
        buffer(layer.layer_id).squeeze(1) for buffer in (kv_pool.get_key_buffer, kv_pool.get_value_buffer)
    )
    index_keys = kv_pool.get_index_key_buffer(layer.layer_id)
    outputs = []
    end = 0
    for i, (count, length) in enumerate(zip(batch.num_new_tokens, batch.lengths)):
        start, end = end, end + count
        positions = torch.arange(length, device=query.device)
        slots = req_to_token_pool.slots(batch.req_pool_indices[i].expand(length), positions)
        own = positions[length - count :].unsqueeze(1)
        fitness = index_scores(index.query[start:end], index_keys[slots], index.weights[start:end])
        fitness = fitness.masked_fill(positions > own, float("-inf"))
        # [count, k]: the first tokens of a prompt have fewer before them, and read none of the others.
        best = fitness.topk(min(index.topk, length), dim=-1).indices
        scores = query[start:end].float()
        if count == 1:  # read only what is attended to
            rows = slots[best[0]]
            weights = _weights(scores @ keys[rows].float().T * layer.scaling, best > own)
            outputs.append(weights.to(values.dtype) @ values[rows])
        else:
            unread = torch.ones_like(fitness, dtype=torch.bool).scatter_(1, best, False) | (positions > own)
            weights = _weights(scores @ keys[slots].float().T * layer.scaling, unread)
            outputs.append(weights.to(values.dtype) @ values[slots])
    return torch.cat(outputs)


def index_scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Return the score of each of ``keys`` [length, dim] for each query [tokens, heads, dim]: [tokens,
    length].
    """
    each = (query.float() @ keys.float().T * query.shape[-1] ** -0.5).relu()
    return torch.matmul(weights.unsqueeze(1), each).squeeze(1)


def _weights(scores: Tensor, hidden: Tensor) -> Tensor:
    """Return scores [tokens, heads, keys] as weights that sum to 1, 0 for ``hidden`` ones [tokens, keys]."""
    return scores.masked_fill(hidden.unsqueeze(1), float("-inf")).softmax(dim=-1)
