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
    from sgl_aspects.runtime.forward_batch import ForwardBatch
    from sgl_aspects.runtime.ops.attention import Attention


@dataclass(eq=False)
class _DecodeStep:
    #: [requests * pages]: the pages of all requests, each padded to the longest with page 0.
    pages: Tensor
    #: [requests, 1, 1, tokens]: 0 where a token is the request's own, -inf on padding.
    mask: Tensor


@dataclass(eq=False)
class _Chunk:
    """One request's part of a prompt in this step."""

    #: Its tokens in the step, counted from the first token after the decoding requests.
    start: int
    end: int
    #: Its pages, and the tokens in them; None where nothing was computed before this step.
    pages: Tensor | None
    length: int
    #: [new tokens, length]: 0 up to each token itself, -inf after; None where pages is.
    mask: Tensor | None


class TorchNativeBackend(AttentionBackend):
    """Gathers pages into one padded block for decoding; prompts run one request at a time.

    The heads that share a key-value head are laid out so that keys and values are never copied for them:
    as several queries of one token when decoding, as a dimension of stride 0 otherwise.
    """

    kinds: ClassVar[frozenset[str]] = frozenset({"mha", "mla", "dsa"})
    _decode: _DecodeStep | None = None
    _chunks: list[_Chunk]

    def prepare(self, batch: ForwardBatch) -> None:
        self._decode = self._decode_step(batch) if batch.num_decodes else None
        self._chunks = []
        start = 0
        for i in range(batch.num_decodes, len(batch.lengths)):
            end = start + batch.num_new_tokens[i]
            self._chunks.append(self._chunk(batch, i, start, end))
            start = end

    def _decode_step(self, batch: ForwardBatch) -> _DecodeStep:
        page_size = self.page_table.page_size
        lengths = batch.lengths[: batch.num_decodes]
        count = -(-max(lengths) // page_size)
        rows = batch.rows[: batch.num_decodes]
        device = self.page_table.table.device
        ends = torch.tensor(lengths, device=device).unsqueeze(1)
        mask = torch.zeros(len(lengths), count * page_size, dtype=self.kv_pool.dtype, device=device)
        mask.masked_fill_(torch.arange(count * page_size, device=device) >= ends, float("-inf"))
        pages = self.page_table.table[rows, :count].reshape(-1)
        return _DecodeStep(pages, mask.view(len(lengths), 1, 1, -1))

    def _chunk(self, batch: ForwardBatch, i: int, start: int, end: int) -> _Chunk:
        length = batch.lengths[i]
        computed = length - (end - start)
        if computed == 0:
            return _Chunk(start, end, None, length, None)
        device = self.page_table.table.device
        count = -(-length // self.page_table.page_size)
        mask = torch.full((end - start, length), float("-inf"), dtype=self.kv_pool.dtype, device=device)
        return _Chunk(
            start, end, self.page_table.table[batch.rows[i], :count], length, mask.triu_(computed + 1)
        )

    def forward_decode(self, query: Tensor, layer: Attention, batch: ForwardBatch) -> Tensor:
        assert self._decode is not None  # prepare() of this step made it
        requests, heads, head_dim = query.shape
        key, value = self._gather(layer, self._decode.pages, requests)
        # [requests, kv_heads, heads of the group, head_dim]: the group's heads are the queries.
        grouped = query.reshape(requests, layer.num_kv_heads, -1, head_dim)
        output = F.scaled_dot_product_attention(
            grouped, key, value, attn_mask=self._decode.mask, scale=layer.scale
        )
        return output.reshape(requests, heads, layer.v_head_dim)

    def forward_extend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: Attention, batch: ForwardBatch
    ) -> Tensor:
        output = query.new_empty(len(query), layer.num_heads, layer.v_head_dim)
        for chunk in self._chunks:
            tokens = slice(chunk.start, chunk.end)
            if chunk.pages is None:
                # [kv_heads, tokens, head_dim] of this step's own keys and values.
                keys, values = key[tokens].transpose(0, 1), value[tokens].transpose(0, 1)
            else:
                gathered_keys, gathered_values = self._gather(layer, chunk.pages, 1)
                keys = gathered_keys[0, :, : chunk.length]
                values = gathered_values[0, :, : chunk.length]
            self._attend(query[tokens], keys, values, layer, chunk.mask, output[tokens])
        return output

    def forward_sparse(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        index: IndexerInputs,
        layer: Attention,
        batch: ForwardBatch,
    ) -> Tensor:
        self.kv_pool.set_kv_buffer(layer.layer_id, batch.slots, key, value)
        self.kv_pool.set_index_key_buffer(layer.layer_id, batch.slots, index.key)
        return sparse_attention(self.kv_pool, self.page_table, query, index, layer, batch)

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: Attention,
        mask: Tensor | None,
        output: Tensor,
    ) -> None:
        """One request: query [tokens, heads, head_dim], keys and values [kv_heads, length, head_dim]."""
        tokens, _, head_dim = query.shape
        shape = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads, -1, head_dim)
        grouped = query.view(tokens, shape[0], shape[1], head_dim).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(
            grouped,
            keys.unsqueeze(1).expand(shape),
            values.unsqueeze(1).expand(*shape[:3], layer.v_head_dim),
            attn_mask=mask,
            is_causal=mask is None,
            scale=layer.scale,
        )
        output.view(tokens, shape[0], shape[1], layer.v_head_dim).copy_(attended.permute(2, 0, 1, 3))

    def _gather(self, layer: Attention, pages: Tensor, requests: int) -> tuple[Tensor, Tensor]:
        """Keys and values of ``pages``, each [requests, kv_heads, tokens, head_dim], views of one buffer."""
        source = self.kv_pool.get_page_buffer(layer.layer_id)
        buffer = self._buffer(len(pages), source)
        torch.index_select(source, 0, pages, out=buffer)
        keys, values = self.kv_pool.split_pages(buffer, requests)
        return keys.transpose(1, 2), values.transpose(1, 2)

    _scratch: Tensor | None = None

    def _buffer(self, pages: int, source: Tensor) -> Tensor:
        """Scratch memory that every layer and step uses again: fresh memory would cost more than the copy."""
        if self._scratch is None or len(self._scratch) < pages:
            # Half as much again, so that growing requests do not need a larger one at each step.
            self._scratch = torch.empty(
                pages + pages // 2, source.shape[1], dtype=source.dtype, device=source.device
            )
        return self._scratch[:pages]
