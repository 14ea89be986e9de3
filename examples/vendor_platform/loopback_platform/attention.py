"""The device's attention, for both engines: one request at a time for prompts, all at once for decoding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from sgl_aspects.runtime.attention.base import AttentionBackend


class LoopbackAttention(AttentionBackend):
    #: Decoding reads nothing on the host, so that the device can record it.
    capturable = True

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The slots of the tokens of the step's requests; the same for all layers."""
        table, rows = self.req_to_token_pool.req_to_token, forward_batch.req_pool_indices
        if forward_batch.forward_mode.is_decode():
            # Every token that a row has room for, so that the sizes are those of any other step.
            self._slots = table[rows]
            positions = torch.arange(table.shape[1], device=table.device)
            self._seen = positions < forward_batch.seq_lens[:, None]
        else:
            lengths = forward_batch.seq_lens.tolist()
            self._prompts = [table[row, :length] for row, length in zip(rows.tolist(), lengths)]

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Attend from each request's token over its slots; those past its length are masked."""
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        query = q.view(-1, 1, layer.tp_q_head_num, layer.qk_head_dim)
        output = _attend(query, *self._read(layer, self._slots), self._seen[:, None, None], layer)
        return output.flatten(1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Attend from each token over those before it and itself."""
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        outputs = []
        for slots, part in zip(self._prompts, torch.split(query, forward_batch.extend_seq_lens_cpu)):
            seen = torch.ones(len(part), len(slots), dtype=torch.bool, device=query.device)
            seen = seen.tril(len(slots) - len(part))
            outputs.append(_attend(part[None], *self._read(layer, slots[None]), seen, layer)[0])
        return torch.cat(outputs).flatten(1)

    def _read(self, layer: Any, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of ``slots`` [requests, tokens]: [requests, tokens, kv_heads, head_dim]."""
        pool = self.token_to_kv_pool
        return pool.get_key_buffer(layer.layer_id)[slots], pool.get_value_buffer(layer.layer_id)[slots]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, layer: Any
) -> torch.Tensor:
    """query [requests, new tokens, heads, head_dim] over [requests, tokens, kv_heads, head_dim]."""
    group = layer.tp_q_head_num // layer.tp_k_head_num
    return F.scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.repeat_interleave(group, dim=2).transpose(1, 2),
        values.repeat_interleave(group, dim=2).transpose(1, 2),
        attn_mask=seen,
        scale=layer.scaling,
    ).transpose(1, 2)
