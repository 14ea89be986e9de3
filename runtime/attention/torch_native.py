"""Attention with PyTorch's own kernels: works on every device, and is the reference for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from sgl_aspects.runtime.attention.base import AttentionBackend, IndexerInputs
from sgl_aspects.runtime.attention.sparse import sparse_attention

if TYPE_CHECKING:
    from sgl_aspects.runtime.execution.forward_batch import ForwardBatch
    from sgl_aspects.runtime.ops.attention import Attention


@dataclass(eq=False)
class _Chunk:
    """One request's part of a prompt in this step."""

    #: Its tokens in the step, counted from the first token after the decoding requests.
    tokens: slice
    #: Tokens in the cache once the step is done.
    length: int
    #: Its pages, and the mask [new tokens, length] that is 0 up to each token itself and -inf after. Both are
    #: None where nothing was computed before this step.
    pages: Tensor | None = None
    mask: Tensor | None = None


class TorchNativeBackend(AttentionBackend):
    """Gathers pages into one padded block for decoding; prompts run one request at a time.

    The heads that share a key-value head are laid out so that keys and values are never copied for them:
    as several queries of one token when decoding, as a dimension of stride 0 otherwise.
    """

    kinds: ClassVar[frozenset[str]] = frozenset({"mha", "mla", "dsa"})
    _chunks: list[_Chunk]

    def prepare(self, batch: ForwardBatch) -> None:
        if batch.num_decodes:
            self._prepare_decodes(batch)
        self._chunks = []
        start = 0
        for i in range(batch.num_decodes, len(batch.lengths)):
            end = start + batch.num_new_tokens[i]
            self._chunks.append(self._chunk(batch, i, slice(start, end)))
            start = end

    def _prepare_decodes(self, batch: ForwardBatch) -> None:
        lengths = batch.lengths[: batch.num_decodes]
        count = self._pages_for(max(lengths))
        table = self.page_table.table
        #: [requests * pages]: the pages of all requests, each padded to the longest with page 0.
        self._decode_pages = table[batch.rows[: batch.num_decodes], :count].reshape(-1)
        positions = torch.arange(count * self.page_table.page_size, device=table.device)
        mask = torch.zeros(len(lengths), len(positions), dtype=self.kv_pool.dtype, device=table.device)
        mask.masked_fill_(positions >= torch.tensor(lengths, device=table.device)[:, None], float("-inf"))
        #: [requests, 1, 1, tokens]: 0 where a token is the request's own, -inf on padding.
        self._decode_mask = mask[:, None, None]

    def _chunk(self, batch: ForwardBatch, i: int, tokens: slice) -> _Chunk:
        length, new = batch.lengths[i], batch.num_new_tokens[i]
        if new == length:
            return _Chunk(tokens, length)
        pages = self.page_table.table[batch.rows[i], : self._pages_for(length)]
        mask = torch.full((new, length), float("-inf"), dtype=self.kv_pool.dtype, device=pages.device)
        return _Chunk(tokens, length, pages, mask.triu_(length - new + 1))

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_table.page_size)

    def forward_decode(self, query: Tensor, layer: Attention, batch: ForwardBatch) -> Tensor:
        requests, heads, head_dim = query.shape
        key, value = self._gather(layer, self._decode_pages, requests)
        # [requests, kv_heads, heads of the group, head_dim]: the group's heads are the queries.
        grouped = query.reshape(requests, layer.num_kv_heads, -1, head_dim)
        output = F.scaled_dot_product_attention(
            grouped, key, value, attn_mask=self._decode_mask, scale=layer.scale
        )
        return output.reshape(requests, heads, layer.v_head_dim)

    def forward_extend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: Attention, batch: ForwardBatch
    ) -> Tensor:
        groups = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads)
        output = query.new_empty(len(query), *groups, layer.v_head_dim)
        for chunk in self._chunks:
            if chunk.pages is None:  # there are only this step's keys and values
                keys, values = key[chunk.tokens].transpose(0, 1), value[chunk.tokens].transpose(0, 1)
            else:
                gathered = self._gather(layer, chunk.pages, 1)
                keys, values = (each[0, :, : chunk.length] for each in gathered)
            # All [kv_heads, heads of the group, tokens, head_dim].
            attended = F.scaled_dot_product_attention(
                query[chunk.tokens].view(-1, *groups, layer.head_dim).permute(1, 2, 0, 3),
                keys.unsqueeze(1).expand(-1, groups[1], -1, -1),
                values.unsqueeze(1).expand(-1, groups[1], -1, -1),
                attn_mask=chunk.mask,
                is_causal=chunk.mask is None,
                scale=layer.scale,
            )
            output[chunk.tokens] = attended.permute(2, 0, 1, 3)
        return output.flatten(1, 2)

    def forward_sparse(
        self, query: Tensor, index: IndexerInputs, layer: Attention, batch: ForwardBatch
    ) -> Tensor:
        return sparse_attention(self.kv_pool, self.page_table, query, index, layer, batch)

    def _gather(self, layer: Attention, pages: Tensor, requests: int) -> tuple[Tensor, Tensor]:
        """Keys and values of ``pages``, each [requests, kv_heads, tokens, head_dim], views of one buffer.

        Of a pool without pages: copies, slot by slot.
        """
        pool = self.kv_pool
        if not hasattr(pool, "get_page_buffer"):
            slots = self._slots(pages).view(requests, -1)
            buffers = (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
            keys, values = (buffer[slots].transpose(1, 2) for buffer in buffers)
            return keys, values
        source = pool.get_page_buffer(layer.layer_id)
        buffer = self._buffer(len(pages), source)
        torch.index_select(source, 0, pages, out=buffer)
        keys, values = pool.split_pages(buffer, requests)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _slots(self, pages: Tensor) -> Tensor:
        size = self.page_table.page_size
        return (pages.unsqueeze(1) * size + torch.arange(size, device=pages.device)).flatten()

    _scratch: Tensor | None = None

    def _buffer(self, pages: int, source: Tensor) -> Tensor:
        """Scratch memory that every layer and step uses again: fresh memory would cost more than the copy."""
        if self._scratch is None or len(self._scratch) < pages:
            # Half as much again, so that growing requests do not need a larger one at each step.
            self._scratch = torch.empty(
                pages + pages // 2, source.shape[1], dtype=source.dtype, device=source.device
            )
        return self._scratch[:pages]
