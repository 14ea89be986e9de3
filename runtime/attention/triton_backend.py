"""Attention for GPUs: decoding in Triton, over pages where they lie; prompts with PyTorch's kernels.

A decoding request reads all its keys and values for one token, so what counts is that the whole device
reads. Each request and key-value head is cut into splits of its tokens, and the splits are put together:

    request 0, head 0   │ split 0 │ split 1 │ split 2 │      each gives its part of the output and the
    request 0, head 1   │ split 0 │ split 1 │ split 2 │      logarithm of its weight: decode_splits
    request 1, head 0   │ split 0 │ split 1 │ (empty) │      their weighted sum: join_splits

How many splits there are depends on the number of requests alone, and lengths are read on the device: the
same launch serves every step, as a captured graph needs it. Sparse attention is the same over a table of the
slots that were chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import triton

from sgl_aspects.runtime.attention.base import IndexerInputs
from sgl_aspects.runtime.attention.torch_native import TorchNativeBackend
from sgl_aspects.runtime.attention.triton_decode import decode_splits, index_scores, join_splits
from sgl_aspects.runtime.ops.triton_kernels import overlapping

if TYPE_CHECKING:
    from sgl_aspects.runtime.forward_batch import ForwardBatch
    from sgl_aspects.runtime.ops.attention import Attention

#: So many programs, each with few tokens, keep a device of about 130 multiprocessors reading.
_PROGRAMS = 1024
_MAX_SPLITS = 16
#: Tokens that a program looks at together, and heads of a group that it does so for.
_BLOCK_TOKENS = 16
_BLOCK_HEADS = 16


class TritonBackend(TorchNativeBackend):
    """Needs a device that Triton compiles for, and pools whose rows are [slots, heads, head_dim] views."""

    capturable: ClassVar[bool] = True
    reads_unwritten_slots: ClassVar[bool] = False

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        self._lengths = batch.device_lengths[: batch.num_decodes]

    def _decode_step(self, batch: ForwardBatch) -> Any:
        """Nothing: the kernels read the page table themselves."""
        return None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: Attention,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """As of any backend, but what decoding requests add is stored by the kernel that reads it."""
        decodes = batch.num_decodes
        if decodes == len(batch.lengths):
            return self._decode_pages(query, key, value, layer, batch)
        prompts = query[decodes:], key[decodes:], value[decodes:]
        self.kv_pool.set_kv_buffer(layer.layer_id, batch.slots[decodes:], *prompts[1:])
        extended = self.forward_extend(*prompts, layer, batch)
        if not decodes:
            return extended
        decoded = self._decode_pages(query[:decodes], key[:decodes], value[:decodes], layer, batch)
        return torch.cat((decoded, extended))

    def forward_sparse(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        index: IndexerInputs,
        layer: Attention,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        if batch.num_decodes < len(batch.lengths):
            return super().forward_sparse(query, key, value, index, layer, batch)
        self.kv_pool.set_kv_buffer(layer.layer_id, batch.slots, key, value)
        self.kv_pool.set_index_key_buffer(layer.layer_id, batch.slots, index.key)
        fitness = self._fitness(index, layer, batch)
        # Sorted: what is past a request's end is last, and past the lengths that the kernels are told.
        best = fitness.topk(min(index.topk, fitness.shape[1]), dim=-1).indices
        slots = self.page_table.slots(batch.rows.unsqueeze(1), best)
        rows = torch.arange(len(slots), device=slots.device)
        lengths = self._lengths.clamp(max=slots.shape[1])
        return self._decode_over(query, None, None, layer, slots, 1, rows, lengths)

    def _fitness(self, index: IndexerInputs, layer: Attention, batch: ForwardBatch) -> torch.Tensor:
        """[requests, tokens of the longest context]: how well each token suits; -inf past the end."""
        keys = self.kv_pool.get_index_key_buffer(layer.layer_id)
        requests, heads, dim = index.query.shape
        table, page_size = self.page_table.table, self.page_table.page_size
        tokens = table.shape[1] * page_size
        fitness = torch.empty(requests, tokens, dtype=torch.float32, device=keys.device)
        block = 64
        index_scores[(requests, triton.cdiv(tokens, block))](
            index.query.contiguous(),
            index.weights.contiguous(),
            keys,
            table,
            batch.rows,
            self._lengths,
            fitness,
            dim**-0.5,
            tokens,
            keys.stride(0),
            table.stride(0),
            PAGE_SIZE=page_size,
            HEADS=heads,
            DIM=dim,
            BLOCK_HEADS=max(16, triton.next_power_of_2(heads)),
            BLOCK_DIM=max(16, triton.next_power_of_2(dim)),
            BLOCK_TOKENS=block,
        )
        return fitness

    def _decode_pages(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: Attention,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        table, page_size = self.page_table.table, self.page_table.page_size
        return self._decode_over(query, key, value, layer, table, page_size, batch.rows, self._lengths)

    def _decode_over(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        layer: Attention,
        table: torch.Tensor,
        page_size: int,
        rows: torch.Tensor,
        lengths: torch.Tensor,
    ) -> torch.Tensor:
        """One token a request; its ``key`` and ``value`` are stored, or None where they are in the pool."""
        requests, heads, head_dim = query.shape
        value_dim = layer.v_head_dim
        keys = self.kv_pool.get_key_buffer(layer.layer_id)
        values = self.kv_pool.get_value_buffer(layer.layer_id)
        stores = key is not None
        new_key, new_value = (keys, values) if key is None or value is None else (key, value)
        group = heads // layer.num_kv_heads
        head_blocks = triton.cdiv(group, _BLOCK_HEADS)
        splits = max(1, min(_MAX_SPLITS, _PROGRAMS // (requests * layer.num_kv_heads * head_blocks)))
        parts = torch.empty(requests, heads, splits, value_dim, dtype=torch.float32, device=query.device)
        weights = torch.empty(requests, heads, splits, dtype=torch.float32, device=query.device)
        block_dim = max(16, triton.next_power_of_2(value_dim))
        decode_splits[(requests, layer.num_kv_heads * head_blocks, splits)](
            query,
            new_key,
            new_value,
            keys,
            values,
            table,
            rows,
            lengths,
            parts,
            weights,
            layer.scale,
            query.stride(0),
            query.stride(1),
            new_key.stride(0),
            new_key.stride(1),
            new_value.stride(0),
            new_value.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            table.stride(0),
            PAGE_SIZE=page_size,
            GROUP=group,
            HEAD_BLOCKS=head_blocks,
            VALUE_DIM=value_dim,
            # A compressed row is a key whose first numbers are the value: the others are looked at apart.
            REST_DIM=head_dim - value_dim,
            STORES=stores,
            BLOCK_HEADS=_BLOCK_HEADS,
            BLOCK_DIM=block_dim,
            BLOCK_REST=max(16, triton.next_power_of_2(head_dim - value_dim)),
            BLOCK_TOKENS=_BLOCK_TOKENS,
            SPLITS=splits,
            num_warps=min(8, max(1, block_dim // 64)),
            **overlapping(),
        )
        output = torch.empty(requests, heads, value_dim, dtype=query.dtype, device=query.device)
        join_splits[(requests, heads)](
            parts,
            weights,
            output,
            HEAD_DIM=value_dim,
            BLOCK_DIM=block_dim,
            SPLITS=splits,
            BLOCK_SPLITS=triton.next_power_of_2(splits),
            num_warps=1 if block_dim <= 128 else 4,
            **overlapping(),
        )
        return output
