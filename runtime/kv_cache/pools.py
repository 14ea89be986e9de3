"""The memory of the key-value cache: one pool for all layers, by the kind of attention.

    kind    a token's row in each layer
    "mha"   │ key heads │ value heads │                               keys and values as they are
    "mla"   │ latent, kv_lora_rank │ rotary key, qk_rope_head_dim │   one compressed row for all heads
    "dsa"   │ the row of "mla" │ and, elsewhere, an indexer key │     what picks the tokens to read

A slot is the place of one token; page 0, the first ``page_size`` slots, is padding that no request owns.
Every pool has ``dtype``, ``clear``, ``set_kv_buffer``, ``get_key_buffer`` and ``get_value_buffer``; one that
attention backends may gather whole pages from has ``get_page_buffer`` and ``split_pages`` too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_aspects.runtime.kv_cache.pages import copy_to


def token_bytes(kind: str, dtype: torch.dtype, layer_num: int, **row: int) -> int:
    """Bytes of one token in all layers; ``row`` are the sizes that a pool of this kind is made with."""
    if kind == "mha":
        width = 2 * row["head_num"] * row["head_dim"]
    else:
        width = row["kv_lora_rank"] + row["qk_rope_head_dim"] + row.get("index_head_dim", 0)
    return layer_num * width * dtype.itemsize


class PagedRows:
    """One row of ``width`` numbers a token, in pages: what the pools are made of. ``size`` in tokens."""

    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, layer_num: int, device: torch.device, width: int
    ) -> None:
        self.dtype = dtype
        self.made_with = size, page_size, dtype, layer_num, device
        pages = size // page_size + 1  # page 0 is the padding
        # Left as the device gives it: the operating system commits memory as pages are first written.
        self._pages = torch.empty(layer_num, pages, page_size * width, dtype=dtype, device=device)
        self._pages[:, 0] = 0
        #: [slots, width] of each layer, views.
        self.rows = list(self._pages.view(layer_num, pages * page_size, width).unbind(0))

    def clear(self, pages: list[int]) -> None:
        """Zero pages before a request gets them: whatever they held, masked or not, must not be NaN."""
        numbers = torch.empty(len(pages), dtype=torch.int64, device=self._pages.device)
        copy_to(numbers, pages)
        self._pages.index_fill_(1, numbers, 0)

    def get_page_buffer(self, layer_id: int) -> Tensor:
        """[pages, page_size * width], a view: what a gather by pages reads."""
        return self._pages[layer_id]


class MHATokenPool(PagedRows):
    """``head_num`` key heads and as many value heads a token, side by side: one gather fetches both.

    Here and below, ``pages`` are the arguments that :class:`PagedRows` has beside its width.
    """

    def __init__(self, *, head_num: int, head_dim: int, **pages: Any) -> None:
        super().__init__(**pages, width=2 * head_num * head_dim)
        self._shape = (2, head_num, head_dim)
        heads = [rows.view(-1, *self._shape) for rows in self.rows]
        self._keys = [layer[:, 0] for layer in heads]
        self._values = [layer[:, 1] for layer in heads]

    def set_kv_buffer(self, layer_id: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key and value [tokens, heads, head_dim] of one layer into ``slots``."""
        self._keys[layer_id].index_copy_(0, slots, key)
        self._values[layer_id].index_copy_(0, slots, value)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """[slots, heads, head_dim], a view."""
        return self._keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """[slots, heads, head_dim], a view."""
        return self._values[layer_id]

    def split_pages(self, gathered: Tensor, requests: int) -> tuple[Tensor, Tensor]:
        """Pages of requests, as many of each, as keys and values [requests, tokens, heads, head_dim]."""
        heads = gathered.view(requests, -1, *self._shape)
        return heads[:, :, 0], heads[:, :, 1]


class MLATokenPool(PagedRows):
    """One compressed row a token, for all heads: the latent that keys and values are made of, then the
    rotary part of the key. To a backend it is one key head, whose first ``kv_lora_rank`` are the value.

    ``kv_cache_dim``: numbers from one row to the next, more than a key has where a kernel wants rows aligned.
    """

    def __init__(
        self, *, kv_lora_rank: int, qk_rope_head_dim: int, kv_cache_dim: int | None = None, **pages: Any
    ) -> None:
        self.kv_lora_rank = kv_lora_rank
        self.key_dim = kv_lora_rank + qk_rope_head_dim
        self.width = kv_cache_dim or self.key_dim
        super().__init__(**pages, width=self.width)

    def set_kv_buffer(self, layer_id: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key [tokens, 1, kv_lora_rank + qk_rope_head_dim]; ``value`` is the first part of it."""
        self.rows[layer_id][:, : self.key_dim].index_copy_(0, slots, key.flatten(1))

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """[slots, 1, kv_lora_rank + qk_rope_head_dim], a view."""
        return self.rows[layer_id][:, : self.key_dim].unsqueeze(1)

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """[slots, 1, kv_lora_rank], a view."""
        return self.get_key_buffer(layer_id)[..., : self.kv_lora_rank]

    def split_pages(self, gathered: Tensor, requests: int) -> tuple[Tensor, Tensor]:
        """Pages of several requests, as many of each, as keys and values [requests, tokens, 1, …]."""
        rows = gathered.view(requests, -1, 1, self.width)
        return rows[..., : self.key_dim], rows[..., : self.kv_lora_rank]


class NSATokenPool(MLATokenPool):
    """The rows of MLA, and beside them ``index_head_dim`` numbers a token that an indexer compares with."""

    def __init__(self, *, index_head_dim: int, **others: Any) -> None:
        super().__init__(**others)
        self._index = PagedRows(*self.made_with, width=index_head_dim)

    def clear(self, pages: list[int]) -> None:
        super().clear(pages)
        self._index.clear(pages)

    def set_index_key_buffer(self, layer_id: int, slots: Tensor, index_key: Tensor) -> None:
        """Write index_key [tokens, index_head_dim] of one layer into ``slots``."""
        self._index.rows[layer_id].index_copy_(0, slots, index_key)

    def get_index_key_buffer(self, layer_id: int) -> Tensor:
        """[slots, index_head_dim], a view."""
        return self._index.rows[layer_id]
