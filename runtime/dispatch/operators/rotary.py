"""Rotary position embeddings, of one axis and of several."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_aspects.runtime.dispatch.define import operator


@operator()
def rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Turn each pair of a head's first ``rotary_dim`` numbers by the angle of its token's position.

    query [tokens, heads, head_dim], key [tokens, kv_heads, head_dim]; cos and sin [positions, rotary_dim /
    2]; positions [tokens]. A pair is (i, i + rotary_dim / 2), or (2 i, 2 i + 1) where ``interleaved``. New
    tensors.
    """
    cos = cos.index_select(0, positions).unsqueeze(1)
    sin = sin.index_select(0, positions).unsqueeze(1)
    if interleaved or 2 * cos.shape[-1] != query.shape[-1]:
        return _rotate(query, cos, sin, interleaved), _rotate(key, cos, sin, interleaved)
    # The usual case, in half as many kernels: with its halves swapped, a whole head is turned at once.
    half = cos.shape[-1]
    cos, sin = torch.cat((cos, cos), -1).to(query.dtype), torch.cat((-sin, sin), -1).to(query.dtype)
    turned_query = torch.addcmul(query * cos, query.roll(half, -1), sin)
    return turned_query, torch.addcmul(key * cos, key.roll(half, -1), sin)


@operator()
def mrotary_embedding(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    sections: tuple[int, ...],
    section_interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotary embedding of several axes: each pair turns by the position on the axis that it belongs to.

    As :func:`rotary_embedding`, with positions [axes, tokens] (time, height, width). ``sections``: the number
    of pairs of each axis: contiguous; with ``section_interleaved`` in turn, axis 0 taking the rest.
    """
    axis_of_pair = axes_of_pairs(sections, section_interleaved, positions.device)
    if len(axis_of_pair) != cos.shape[-1]:
        raise ValueError(
            f"sections={tuple(sections)} have {len(axis_of_pair)} pairs, cos has {cos.shape[-1]}"
        )
    rows = positions.index_select(0, axis_of_pair).T  # [tokens, pairs]
    cos = cos.gather(0, rows).unsqueeze(1)
    sin = sin.gather(0, rows).unsqueeze(1)
    return _rotate(query, cos, sin, False), _rotate(key, cos, sin, False)


def axes_of_pairs(sections: tuple[int, ...], interleaved: bool, device: torch.device | None = None) -> Tensor:
    """[pairs]: the axis of each."""
    if not interleaved:
        axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
        return torch.tensor(axes, device=device)
    axes = [0] * sum(sections)
    for axis, count in list(enumerate(sections))[1:]:
        for pair in range(axis, min(count * len(sections), len(axes)), len(sections)):
            axes[pair] = axis
    return torch.tensor(axes, device=device)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [tokens, heads, head_dim]; cos and sin [tokens, 1, rotary_dim / 2]."""
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :pairs], turned[..., pairs:]
    one, two = first * cos - second * sin, second * cos + first * sin
    joined = torch.stack((one, two), -1).flatten(-2) if interleaved else torch.cat((one, two), -1)
    return torch.cat((joined, rest), -1) if rest.shape[-1] else joined
