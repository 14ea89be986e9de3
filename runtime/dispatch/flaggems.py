"""The default backend: FlagGems' Triton kernels (``pip install flag-gems``), where they run.

Each function adapts FlagGems' own call to the operator's contract, and rejects unsupported calls before
anything is computed.
"""

# mypy: no-warn-return-any

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from sgl_aspects.errors import UnsupportedCallError
from sgl_aspects.platforms import current_platform
from sgl_aspects.runtime.dispatch.registry import OpRegistry
from sgl_aspects.runtime.dispatch.types import needs

#: Where Triton has a compiler for the device.
DEVICE_TYPES = frozenset({"cuda", "xpu", "npu", "musa", "mlu"})
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32})


def _gems() -> Any:
    return importlib.import_module("flag_gems")


def available() -> bool | str:
    """Register, importing the package only if it is installed and the platform has a Triton."""
    if not current_platform.capabilities.supports_triton:
        return f"platform {current_platform.device_name} declares no Triton"
    return needs("flag_gems", "flag-gems")()


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return _gems().silu_and_mul(gate, up)


def gelu_and_mul(x: Tensor, approximate: str = "tanh") -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return _gems().gelu_and_mul(gate, up, approximate)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    # FlagGems' fused_add_rms_norm writes into both inputs, which the operator promises to leave alone.
    total = x if residual is None else x + residual
    normed: Tensor = _gems().rms_norm(total, list(weight.shape), weight, eps)
    return normed if residual is None else (normed, total)


def gemma_rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    return rms_norm(x, weight.float() + 1.0, eps, residual)


def rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    if 2 * cos.shape[-1] != query.shape[-1]:
        raise UnsupportedCallError("FlagGems rotates whole heads, not a part of them")
    return _gems().apply_rotary_pos_emb(query, key, cos, sin, positions, interleaved)


def topk(
    router_logits: Tensor, k: int, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    if scoring != "softmax" or k > 32:
        raise UnsupportedCallError(f"FlagGems chooses up to 32 experts by softmax, not {k} by {scoring}")
    tokens = len(router_logits)
    weights = router_logits.new_empty(tokens, k, dtype=torch.float32)
    ids = router_logits.new_empty(tokens, k, dtype=torch.int64)
    rows = router_logits.new_empty(tokens, k, dtype=torch.int32)
    _gems().topk_softmax(weights, ids, rows, router_logits.contiguous(), renormalize)
    return weights, ids


def fused_moe(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
) -> Tensor:
    if activation != "silu":
        raise UnsupportedCallError(f"FlagGems' experts use silu, not {activation}")
    return _gems().outplace_fused_experts(
        x.contiguous(), gate_up_weight, down_weight, topk_weights, topk_ids.int(), activation
    )


def register(registry: OpRegistry) -> None:
    registry.register_functions(
        "default.flaggems",
        silu_and_mul,
        gelu_and_mul,
        rms_norm,
        gemma_rms_norm,
        rotary_embedding,
        topk,
        fused_moe,
        supported_dtypes=_DTYPES,
        device_types=DEVICE_TYPES,
        is_available=available,
    )
