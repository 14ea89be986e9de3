"""The device's key-value pool, for both engines: all keys in one tensor, all values in another."""

from __future__ import annotations

from typing import Any

import torch


class LoopbackTokenPool:
    """[layers, slots, heads, head_dim], twice, of the layers from ``start_layer`` to ``end_layer``.

    Slots 0 to page_size - 1 are page 0, the padding.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: torch.device,
        head_num: int,
        head_dim: int,
        enable_memory_saver: bool,
        start_layer: int,
        end_layer: int,
    ) -> None:
        self.dtype = dtype
        self.page_size = page_size
        self.start_layer = start_layer
        slots = (size // page_size + 1) * page_size
        self.keys = torch.zeros(layer_num, slots, head_num, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)

    def clear(self, pages: list[int]) -> None:
        for page in pages:
            slots = slice(page * self.page_size, (page + 1) * self.page_size)
            self.keys[:, slots] = 0
            self.values[:, slots] = 0

    def set_kv_buffer(
        self, layer: Any, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        self.keys[layer.layer_id - self.start_layer, loc] = cache_k
        self.values[layer.layer_id - self.start_layer, loc] = cache_v

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.keys[layer_id - self.start_layer]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.values[layer_id - self.start_layer]
