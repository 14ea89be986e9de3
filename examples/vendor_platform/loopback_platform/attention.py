"""The device's attention: one request at a time for prompts, all at once for decoding."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from sgl_aspects.runtime.attention.base import AttentionBackend
from sgl_aspects.runtime.execution.forward_batch import ForwardBatch
from sgl_aspects.runtime.ops import Attention


class LoopbackAttention(AttentionBackend):
    #: Decoding reads nothing on the host, so that the device can record it.
    capturable = True

    def prepare(self, batch: ForwardBatch) -> None:
        """The addresses of the tokens of the step's requests; the same for all layers."""
        decodes = batch.num_decodes
        if decodes:
            # Every token that a row has room for, so that the sizes are those of any other step.
            positions = torch.arange(self._room, device=batch.rows.device).expand(decodes, -1)
            self._slots = self.page_table.slots(batch.rows[:decodes, None], positions)
            self._seen = positions < batch.device_lengths[:decodes, None]
        self._prompts = []
        for row, length in zip(batch.rows[decodes:].tolist(), batch.lengths[decodes:]):
            positions = torch.arange(length, device=batch.rows.device)
            self._prompts.append(self.page_table.slots(torch.full_like(positions, row), positions))

    @property
    def _room(self) -> int:
        return self.page_table.table.shape[1] * self.page_table.page_size

    def forward_decode(self, query: torch.Tensor, layer: Attention, batch: ForwardBatch) -> torch.Tensor:
        """Attend from each request's token over its slots; those past its length are masked."""
        output = _attend(
            query.unsqueeze(1), *self._read(layer, self._slots), self._seen[:, None, None], layer
        )
        return output.squeeze(1)

    def forward_extend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: Attention,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Attend from each token over those before it and itself."""
        outputs = []
        parts = torch.split(query, batch.num_new_tokens[batch.num_decodes :])
        for slots, part in zip(self._prompts, parts):
            seen = torch.ones(len(part), len(slots), dtype=torch.bool, device=query.device)
            seen = seen.tril(len(slots) - len(part))
            outputs.append(_attend(part[None], *self._read(layer, slots[None]), seen, layer)[0])
        return torch.cat(outputs)

    def _read(self, layer: Attention, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of ``slots`` [requests, tokens]: [requests, tokens, kv_heads, head_dim]."""
        pool = self.kv_pool
        return pool.get_key_buffer(layer.layer_id)[slots], pool.get_value_buffer(layer.layer_id)[slots]


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, layer: Attention
) -> torch.Tensor:
    """query [requests, new tokens, heads, head_dim] over [requests, tokens, kv_heads, head_dim]."""
    group = layer.num_heads // layer.num_kv_heads
    return F.scaled_dot_product_attention(
        query.transpose(1, 2),
        keys.repeat_interleave(group, dim=2).transpose(1, 2),
        values.repeat_interleave(group, dim=2).transpose(1, 2),
        attn_mask=seen,
        scale=layer.scale,
    ).transpose(1, 2)
