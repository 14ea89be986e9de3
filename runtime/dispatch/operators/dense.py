"""Gated activations, norms, products and look-ups."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from sgl_aspects.runtime.dispatch.define import operator


@operator()
def silu_and_mul(x: Tensor) -> Tensor:
    """[..., 2 n] → [..., n]: ``silu(first half) * second half``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@operator()
def gelu_and_mul(x: Tensor, approximate: str = "tanh") -> Tensor:
    """[..., 2 n] → [..., n]: ``gelu(first half) * second half``; ``approximate`` is "tanh" or "none"."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)


@operator()
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """``x / rms(x) * weight`` over the last dimension, computed in float32 at least.

    With ``residual``: adds ``x`` to it first, and returns (normalized sum, sum), both new.
    """
    if residual is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


@operator()
def gemma_rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Like :func:`rms_norm`, with ``1 + weight``; rounded to x's type once, at the end."""
    total = x if residual is None else x + residual
    exact = total.double() if total.dtype == torch.float64 else total.float()
    normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    normed = (normed * (1.0 + weight.to(exact.dtype))).to(x.dtype)
    return normed if residual is None else (normed, total)


@operator()
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``.

    ``packed``: the weight as the ``prepare`` of an implementation packed it; ``weight`` may be empty then.
    """
    if packed is not None and weight.numel() == 0:
        weight = packed.to_dense()
    return F.linear(x, weight, bias)


@operator(keyed_by="weight")
def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """[tokens] → [tokens, hidden_size]: rows of the weight."""
    return F.embedding(token_ids, weight)
