"""The device's operators: layers of the runtime run ``forward_<dispatch key>`` where they have one."""

from __future__ import annotations

import torch

from sgl_aspects.runtime.ops import RMSNorm


def rms_norm(
    self: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Like ``RMSNorm``: with a residual, (normalized sum, sum)."""
    total = x if residual is None else x + residual
    exact = total.float()
    scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
    normalized = (exact * scale * self.weight.float()).to(x.dtype)
    return normalized if residual is None else (normalized, total)


def register() -> None:
    RMSNorm.forward_loopback = rms_norm
