"""Ascend: the fused operators of ``torch_npu``."""

# mypy: no-warn-return-any

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from sgl_aspects.errors import UnsupportedCallError
from sgl_aspects.runtime.dispatch.registry import OpRegistry
from sgl_aspects.runtime.dispatch.types import needs

_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


def _npu() -> Any:
    return importlib.import_module("torch_npu")


def silu_and_mul(x: Tensor) -> Tensor:
    return _npu().npu_swiglu(x, dim=-1)


def gelu_and_mul(x: Tensor, approximate: str = "tanh") -> Tensor:
    return _npu().npu_geglu(x, dim=-1, approximate=1 if approximate == "tanh" else 0, activate_left=True)[0]


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    if residual is None:
        return _npu().npu_rms_norm(x, weight, eps)[0]
    result, _, total = _npu().npu_add_rms_norm(x, residual, weight, eps)
    return result, total


def rotary_embedding(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    if interleaved or 2 * cos.shape[-1] != query.shape[-1]:
        raise UnsupportedCallError("npu_rotary_mul turns halves of whole heads")
    rows = (
        torch.cat((each, each), -1).index_select(0, positions)[None, :, None, :].to(query.dtype)
        for each in (cos, sin)
    )
    cosines, sines = rows
    turned = (_npu().npu_rotary_mul(each[None].contiguous(), cosines, sines)[0] for each in (query, key))
    first, second = turned
    return first, second


def register(registry: OpRegistry) -> None:
    registry.register_functions(
        "vendor.ascend",
        silu_and_mul,
        gelu_and_mul,
        rms_norm,
        rotary_embedding,
        supported_dtypes=_FLOATS,
        device_types=("npu",),
        is_available=needs("torch_npu"),
    )
