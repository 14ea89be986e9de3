"""NVIDIA: the kernels of ``sgl_kernel``, and those that torch itself has for the device."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from sgl_aspects.errors import UnsupportedCallError
from sgl_aspects.runtime.dispatch.registry import OpRegistry
from sgl_aspects.runtime.dispatch.types import needs, on_platform

_HALVES = frozenset({torch.float16, torch.bfloat16})


def _kernels() -> Any:
    return importlib.import_module("sgl_kernel")


def silu_and_mul(x: Tensor) -> Tensor:
    output = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    _kernels().silu_and_mul(x.contiguous(), output)
    return output


def gelu_and_mul(x: Tensor, approximate: str = "tanh") -> Tensor:
    output = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    kernel = _kernels().gelu_tanh_and_mul if approximate == "tanh" else _kernels().gelu_and_mul
    kernel(x.contiguous(), output)
    return output


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    return _norm("rmsnorm", x, weight, eps, residual)


def gemma_rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    return _norm("gemma_rmsnorm", x, weight, eps, residual)


def _norm(
    kernel: str, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    if x.shape[-1] != weight.shape[-1]:
        raise UnsupportedCallError(f"{kernel} normalizes whole rows of its weight's size")
    total = x if residual is None else x + residual  # the fused form would write into both
    rows = total.reshape(-1, total.shape[-1])
    normed: Tensor = getattr(_kernels(), kernel)(rows, weight, eps).view(total.shape)
    return normed if residual is None else (normed, total)


def topk(
    router_logits: Tensor, k: int, renormalize: bool = True, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    if scoring != "softmax":
        raise UnsupportedCallError(f"topk_softmax scores by softmax, not by {scoring}")
    weights = router_logits.new_empty(len(router_logits), k, dtype=torch.float32)
    ids = router_logits.new_empty(len(router_logits), k, dtype=torch.int32)
    _kernels().topk_softmax(weights, ids, router_logits.contiguous(), renormalize)
    return weights, ids.long()


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """torch's own embedding fetches few rows one after the other."""
    return weight[token_ids]


def register(registry: OpRegistry) -> None:
    here: dict[str, Any] = {"device_types": ("cuda",)}
    registry.register_functions("vendor.cuda", embedding, is_available=on_platform("cuda"), **here)
    here |= {"min_arch": (8, 0), "is_available": needs("sgl_kernel", "sgl-kernel")}
    activations_and_norms = silu_and_mul, gelu_and_mul, rms_norm, gemma_rms_norm
    registry.register_functions("vendor.cuda", *activations_and_norms, supported_dtypes=_HALVES, **here)
    registry.register_functions("vendor.cuda", topk, supported_dtypes=_HALVES | {torch.float32}, **here)
