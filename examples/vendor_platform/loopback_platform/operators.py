"""The device's operators: each takes the arguments of the runtime's operator, in its order."""

from __future__ import annotations

import torch

from sgl_aspects.runtime.ops import Operator, RMSNorm


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """[..., hidden]; with a residual, (normalized sum, sum)."""
    total = x if residual is None else x + residual
    exact = total.float()
    scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    normalized = (exact * scale * weight.float()).to(x.dtype)
    return normalized if residual is None else (normalized, total)


def register() -> None:
    Operator.register_oot_forward(RMSNorm, rms_norm, "loopback")
