"""Rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.loader.model_config import RopeConfig
from sgl_aspects.runtime.ops.base import Operator


class RotaryEmbedding(Operator):
    """Rotates each pair (i, i + head_dim / 2) of a head by an angle that grows with the position."""

    op_name = "rotary_embedding"

    def __init__(self, rope: RopeConfig, head_dim: int, context_length: int, dtype: torch.dtype) -> None:
        super().__init__()
        positions = torch.arange(context_length, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
        sharpness = yarn_sharpness(rope)
        cos, sin = (angles.cos() * sharpness).to(dtype), (angles.sin() * sharpness).to(dtype)
        self.cos, self.sin = cos, sin

    def compute(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """query [tokens, heads, head_dim] and key [tokens, kv_heads, head_dim], rotated, in new tensors."""
        return dispatch.rotary_embedding(query, key, self.cos, self.sin, positions)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2], radians per position, scaled as the checkpoint specifies."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.frequency_divisors:
        return frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _llama3_scaled(frequencies, rope)
    if rope.scaling == "yarn":
        return _yarn_scaled(frequencies, rope, head_dim)
    return frequencies


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return the sharpening of attention over a context ``factor`` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def yarn_sharpness(rope: RopeConfig) -> float:
    """The factor of cosines and sines; 1 except for yarn."""
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)


def _llama3_scaled(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between blended smoothly."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_context_length / wavelengths  # over the length the model was first trained on
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn_scaled(frequencies: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Frequencies that turn often within the first training's length are kept, slow ones stretched."""

    def dimension(turns: float) -> float:
        """The (fractional) index of the frequency that makes ``turns`` turns over that length."""
        wavelength = rope.original_context_length / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    places = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched = ((places - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequencies / rope.factor * stretched + frequencies * (1 - stretched)
