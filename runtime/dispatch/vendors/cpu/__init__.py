"""CPU: oneDNN's products on packed weights, about twice as fast as the plain ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from sgl_aspects.runtime.dispatch.registry import OpRegistry
from sgl_aspects.runtime.dispatch.types import on_platform

#: oneDNN's layout depends on a number of rows; the one for 8 was within noise of the fastest from 1 to 64.
_PACKED_FOR_ROWS = 8


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Tensor | None = None) -> Tensor:
    """oneDNN compiles a kernel for each number of rows and keeps all of them, whatever the capacity of its
    cache: prompts of many lengths would cost hundreds of MiB. So numbers of rows are rounded up."""
    if packed is None:
        return F.linear(x, weight, bias)
    rows = x.shape[0]
    if x.ndim == 2 and (more := rounded_rows(rows) - rows):
        x = F.pad(x, (0, 0, 0, more))
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product[:rows]


def pack(weight: Tensor) -> Tensor | None:
    """Return the weight in oneDNN's layout; None if it has no fast product for the type."""
    if not _can_pack(weight):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def rounded_rows(rows: int) -> int:
    """The next larger of 8 numbers between each power of two and the next; up to 16 each is its own."""
    step = 1 << max((rows - 1).bit_length() - 4, 0)
    return -(-rows // step) * step


def _can_pack(weight: Tensor) -> bool:
    """float32 everywhere; bfloat16 and float16 where the processor has instructions for them."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def register(registry: OpRegistry) -> None:
    registry.register_functions("vendor.cpu", linear, is_available=on_platform("cpu"), prepare=pack)
