"""The device's attention: one request at a time, over the slots that its pages name."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from sgl_aspects.runtime.attention.base import AttentionBackend
from sgl_aspects.runtime.forward_batch import ForwardBatch
from sgl_aspects.runtime.ops import Attention


class LoopbackAttention(AttentionBackend):
    def prepare(self, batch: ForwardBatch) -> None:
        """Where each request's tokens live; the same for all layers of the step."""
        device = self.page_table.table.device
        self._slots = []
        for row, length in zip(batch.rows.tolist(), batch.lengths):
            positions = torch.arange(length, device=device)
            self._slots.append(self.page_table.slots(torch.full_like(positions, row), positions))

    def forward_decode(self, query: torch.Tensor, layer: Attention, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(query, layer, self._slots[: batch.num_decodes], [1] * batch.num_decodes)

    def forward_extend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: Attention,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        first = batch.num_decodes
        return self._attend(query, layer, self._slots[first:], batch.num_new_tokens[first:])

    def _attend(
        self, query: torch.Tensor, layer: Attention, slots: list[torch.Tensor], counts: list[int]
    ) -> torch.Tensor:
        keys, values = (
            self.kv_pool.get_key_buffer(layer.layer_id),
            self.kv_pool.get_value_buffer(layer.layer_id),
        )
        group = layer.num_heads // layer.num_kv_heads
        outputs = []
        for mine, part in zip(slots, torch.split(query, counts)):
            # Each token sees those before it and itself: the last token sees all.
            seen = torch.ones(len(part), len(mine), dtype=torch.bool, device=query.device)
            output = F.scaled_dot_product_attention(
                part.transpose(0, 1),
                keys[mine].repeat_interleave(group, dim=1).transpose(0, 1),
                values[mine].repeat_interleave(group, dim=1).transpose(0, 1),
                attn_mask=seen.tril(len(mine) - len(part)),
                scale=layer.scale,
            )
            outputs.append(output.transpose(0, 1))
        return torch.cat(outputs)
