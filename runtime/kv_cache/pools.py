"""The memory of the key-value cache: one pool for all layers, by the kind of attention.

    kind    a token's row in each layer
    "mha"   │ key heads │ value heads │                               keys and values as they are
    "mla"   │ latent, kv_lora_rank │ rotary key, qk_rope_head_dim │   one compressed row for all heads
    "dsa"   │ the row of "mla" │ indexer key │                        selects the tokens to read

A slot is the place of one token; page 0, the first ``page_size`` slots, is padding that no request owns.
Every pool has ``dtype``, ``set_kv_buffer``, ``get_key_buffer`` and ``get_value_buffer`` with the arguments of
SGLang's, and is made with the keywords that SGLang gives. Optional methods of a pool: ``clear``, and for
attention that gathers whole pages ``get_page_buffer`` with ``split_pages``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_aspects.errors import ConfigError
from sgl_aspects.runtime.kv_cache.pages import copy_to


def token_bytes(kind: str, dtype: torch.dtype, layer_num: int, **row: int) -> int:
    """Bytes of one token in all layers; ``row`` are the sizes that a pool of this kind is made with."""
    if kind == "mha":
        return layer_num * 2 * row["head_num"] * row["head_dim"] * dtype.itemsize
    key = row.get("kv_cache_dim") or row["kv_lora_rank"] + row["qk_rope_head_dim"]
    return layer_num * (key + row.get("index_head_dim", 0)) * dtype.itemsize


class TokenPool:
    """The base of the pools: one row of ``width`` numbers a token, in pages. ``size`` in tokens.

    ConfigError for ``enable_memory_saver``: memory allocated here is not released.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: torch.device,
        width: int,
        enable_memory_saver: bool = False,
        start_layer: int = 0,
        end_layer: int | None = None,
    ) -> None:
        if enable_memory_saver:
            raise ConfigError("enable_memory_saver: the pools of this engine keep their memory")
        self.start_layer = start_layer
        self.end_layer = start_layer + layer_num - 1 if end_layer is None else end_layer
        self.dtype = dtype
        self.width = width
        pages = size // page_size + 1  # page 0 is the padding
        # Uninitialized: the operating system commits memory as pages are first written.
        self._pages = torch.empty(layer_num, pages, page_size * width, dtype=dtype, device=device)
        self._pages[:, 0] = 0
        #: [slots, width] of each layer, views.
        self.rows = list(self._pages.view(layer_num, pages * page_size, width).unbind(0))
        self._buffers = [self.split(rows) for rows in self.rows]

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [..., width] as keys and values [..., heads, head_dim], views."""
        raise NotImplementedError

    def clear(self, pages: list[int]) -> None:
        """Zero pages before a request gets them: NaN in them would survive any mask."""
        numbers = torch.empty(len(pages), dtype=torch.int64, device=self._pages.device)
        copy_to(numbers, torch.tensor(pages, device="cpu"))
        self._pages.index_fill_(1, numbers, 0)

    def set_kv_buffer(self, layer: Any, loc: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
        """Write keys and values [tokens, heads, head_dim] of ``layer.layer_id`` into the slots ``loc``."""
        keys, values = self._buffers[layer.layer_id - self.start_layer]
        keys.index_copy_(0, loc, cache_k)
        values.index_copy_(0, loc, cache_v)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        """[slots, heads, head_dim], a view."""
        return self._buffers[layer_id - self.start_layer][0]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        """[slots, heads, v_head_dim], a view."""
        return self._buffers[layer_id - self.start_layer][1]

    def get_page_buffer(self, layer_id: int) -> Tensor:
        """[pages, page_size * width], a view for gathering whole pages."""
        return self._pages[layer_id - self.start_layer]

    def split_pages(self, gathered: Tensor, requests: int) -> tuple[Tensor, Tensor]:
        """Split equally many pages of each request: keys and values [requests, tokens, heads, head_dim]."""
        return self.split(gathered.view(requests, -1, self.width))


class MHATokenPool(TokenPool):
    """``head_num`` key heads and ``head_num`` value heads a token, side by side: one gather fetches both.

    Here and below, ``pages`` are the arguments that :class:`TokenPool` has beside its width.
    """

    def __init__(self, *, head_num: int, head_dim: int, **pages: Any) -> None:
        self._shape = (2, head_num, head_dim)
        super().__init__(**pages, width=2 * head_num * head_dim)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = rows.view(*rows.shape[:-1], *self._shape).unbind(-3)
        return keys, values


class MLATokenPool(TokenPool):
    """One compressed row a token, for all heads: the latent that keys and values are made of, then the
    rotary part of the key. To a backend it is one key head, whose first ``kv_lora_rank`` are the value.

    ``kv_cache_dim``: numbers from one row to the next, more than a key has if a kernel needs aligned rows.
    ``index_head_dim``: numbers after that, of :class:`NSATokenPool`.
    """

    def __init__(
        self,
        *,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        kv_cache_dim: int | None = None,
        index_head_dim: int = 0,
        **pages: Any,
    ) -> None:
        self.kv_lora_rank = kv_lora_rank
        self.key_dim = kv_lora_rank + qk_rope_head_dim
        self.index_start = kv_cache_dim or self.key_dim
        super().__init__(**pages, width=self.index_start + index_head_dim)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        heads = rows.unsqueeze(-2)
        return heads[..., : self.key_dim], heads[..., : self.kv_lora_rank]

    def set_kv_buffer(self, layer: Any, loc: Tensor, cache_k: Tensor, cache_v: Tensor) -> None:
        """Write keys [tokens, 1, kv_lora_rank + qk_rope_head_dim]; values are the first part of them."""
        self.get_key_buffer(layer.layer_id).index_copy_(0, loc, cache_k)


class NSATokenPool(MLATokenPool):
    """The rows of MLA, and at the end of each ``index_head_dim`` numbers that an indexer compares with."""

    def set_index_key_buffer(self, layer: Any, loc: Tensor, index_key: Tensor) -> None:
        """Write index_key [tokens, index_head_dim] of ``layer.layer_id`` into the slots ``loc``."""
        self.get_index_key_buffer(layer.layer_id).index_copy_(0, loc, index_key)

    def get_index_key_buffer(self, layer_id: int) -> Tensor:
        """[slots, index_head_dim], a view."""
        return self.rows[layer_id - self.start_layer][:, self.index_start :]
