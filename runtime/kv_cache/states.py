"""StatePool: the states of linear attention layers, one per request, of fixed size."""

from __future__ import annotations

import math

import torch

from sgl_aspects.runtime.loader.model_config import LinearAttentionConfig


class StatePool:
    """The last tokens before the convolution, and the state in float32, by layer and row of ``req_to_token``.

    A request whose first token is computed begins with zeros: nothing is cleared when it ends.
    """

    def __init__(
        self, config: LinearAttentionConfig, rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layers = {layer: place for place, layer in enumerate(sorted(config.layers))}
        convolved, state = _shapes(config)
        count = len(self._layers)
        self._convolved = torch.zeros(count, rows + 1, *convolved, dtype=dtype, device=device)
        self._states = torch.zeros(count, rows + 1, *state, dtype=torch.float32, device=device)

    @staticmethod
    def bytes_for(config: LinearAttentionConfig, rows: int, dtype: torch.dtype) -> int:
        convolved, state = _shapes(config)
        each = math.prod(convolved) * dtype.itemsize + math.prod(state) * torch.float32.itemsize
        return len(config.layers) * (rows + 1) * each

    def of_layer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, conv_dim, kernel_size - 1] and [rows, value_heads, key_head_dim, value_head_dim], views."""
        place = self._layers[layer_id]
        return self._convolved[place], self._states[place]


def _shapes(config: LinearAttentionConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    convolved = config.conv_dim, config.kernel_size - 1
    return convolved, (config.num_value_heads, config.key_head_dim, config.value_head_dim)
