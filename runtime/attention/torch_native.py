"""Attention with PyTorch's own kernels: works on every device, and is the reference for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from sgl_aspects.runtime.attention.base import Attention, AttentionBackend, IndexerInputs
from sgl_aspects.runtime.attention.sparse import sparse_attention

if TYPE_CHECKING:
    from sgl_aspects.runtime.core import ForwardBatch


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

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        batch = forward_batch
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
        table = self.req_to_token_pool
        #: [requests * pages]: the pages of all requests, each padded to the longest with page 0.
        self._decode_pages = table.pages(batch.req_pool_indices[: batch.num_decodes], count).reshape(-1)
        device, dtype = self._decode_pages.device, self.token_to_kv_pool.dtype
        positions = torch.arange(count * table.page_size, device=device)
        mask = torch.zeros(len(lengths), len(positions), dtype=dtype, device=device)
        mask.masked_fill_(positions >= torch.tensor(lengths, device=device)[:, None], float("-inf"))
        #: [requests, 1, 1, tokens]: 0 where a token is the request's own, -inf on padding.
        self._decode_mask = mask[:, None, None]

    def _chunk(self, batch: ForwardBatch, i: int, tokens: slice) -> _Chunk:
        length, new = batch.lengths[i], batch.num_new_tokens[i]
        if new == length:
            return _Chunk(tokens, length)
        pages = self.req_to_token_pool.pages(batch.req_pool_indices[i : i + 1], self._pages_for(length))[0]
        dtype = self.token_to_kv_pool.dtype
        mask = torch.full((new, length), float("-inf"), dtype=dtype, device=pages.device)
        return _Chunk(tokens, length, pages, mask.triu_(length - new + 1))

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.req_to_token_pool.page_size)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Attention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        index: IndexerInputs | None = None,
    ) -> Tensor:
        query = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        if index is None:
            return self._attend(query, k, v, layer, forward_batch, save_kv_cache).flatten(1)
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
            self.token_to_kv_pool.set_index_key_buffer(layer, forward_batch.out_cache_loc, index.key)
        pools = self.token_to_kv_pool, self.req_to_token_pool
        return sparse_attention(*pools, query, index, layer, forward_batch).flatten(1)

    forward_decode = forward_extend

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: Attention, batch: ForwardBatch, saves: bool
    ) -> Tensor:
        """query [tokens, heads, head_dim] → [tokens, heads, v_head_dim]."""
        if saves:
            self.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc, key, value)
        decodes = batch.num_decodes
        if decodes == 0:
            return self._prompts(query, key, value, layer)
        decoded = self._decodes(query[:decodes], layer)
        if decodes == len(batch.lengths):
            return decoded
        return torch.cat((decoded, self._prompts(query[decodes:], key[decodes:], value[decodes:], layer)))

    def _decodes(self, query: Tensor, layer: Attention) -> Tensor:
        """One token of each decoding request, over its cached tokens."""
        requests, heads, head_dim = query.shape
        key, value = self._gather(layer, self._decode_pages, requests)
        # [requests, kv_heads, heads of the group, head_dim]: the group's heads are the queries.
        grouped = query.reshape(requests, layer.tp_k_head_num, -1, head_dim)
        output = F.scaled_dot_product_attention(
            grouped, key, value, attn_mask=self._decode_mask, scale=layer.scaling
        )
        return output.reshape(requests, heads, layer.v_head_dim)

    def _prompts(self, query: Tensor, key: Tensor, value: Tensor, layer: Attention) -> Tensor:
        """The prompts' tokens: each over its request's cached tokens, up to itself."""
        groups = (layer.tp_k_head_num, layer.tp_q_head_num // layer.tp_k_head_num)
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
                scale=layer.scaling,
            )
            output[chunk.tokens] = attended.permute(2, 0, 1, 3)
        return output.flatten(1, 2)

    def _gather(self, layer: Attention, pages: Tensor, requests: int) -> tuple[Tensor, Tensor]:
        """Keys and values of ``pages``, each [requests, kv_heads, tokens, head_dim], views of one buffer.

        Of a pool without pages: copies, slot by slot.
        """
        pool = self.token_to_kv_pool
        if not hasattr(pool, "get_page_buffer"):
            size = self.req_to_token_pool.page_size
            slots = (pages.unsqueeze(1) * size + torch.arange(size, device=pages.device)).view(requests, -1)
            buffers = (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
            keys, values = (buffer[slots].transpose(1, 2) for buffer in buffers)
            return keys, values
        source = pool.get_page_buffer(layer.layer_id)
        buffer = self._buffer(len(pages), source)
        torch.index_select(source, 0, pages, out=buffer)
        keys, values = pool.split_pages(buffer, requests)
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
