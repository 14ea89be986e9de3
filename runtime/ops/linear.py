"""Matrix products with weights."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sgl_aspects.runtime.dispatch.reference import dense
from sgl_aspects.runtime.ops.base import Operator, parameter

#: oneDNN lays weights out for a number of rows; what suits 8 was within noise of the fastest from 1 to 64.
_PACKED_FOR_ROWS = 8


class Linear(Operator):
    """``x @ weight.T + bias`` with weight [out_features, in_features]."""

    op_name = "linear"
    bias: nn.Parameter | None
    #: True where a few bits less would change what the model does.
    keeps_precision: ClassVar[bool] = False

    def __init__(
        self, in_features: int, out_features: int, dtype: torch.dtype, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=dtype)
        self.bias = parameter(out_features, dtype=dtype) if bias else None
        #: True where another operator uses the same weight, as with tied embeddings.
        self.shares_weight = False
        #: [out_features]: of a weight that was quantized, by what each row is multiplied.
        self.scale: Tensor | None = None
        self._packed: Tensor | None = None

    def quantize(self, dtype: torch.dtype) -> None:
        """Keep the weight in ``dtype``, of 8 bits, each row as a share of its largest number."""
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        exact = self.weight.float()
        largest = exact.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
        scale = largest / info.max
        shares = exact / scale if dtype.is_floating_point else (exact / scale).round()
        self.scale = scale.squeeze(1)
        self.weight = nn.Parameter(shares.to(dtype), requires_grad=False)

    def prepare_weights(self) -> None:
        if self.scale is None:  # forms of the platform take weights as they were saved
            super().prepare_weights()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] → [..., out_features]."""
        output: Tensor
        if self.scale is None:
            output = super().forward(x)
            return output
        output = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return output if self.bias is None else output + self.bias

    def forward_native(self, x: Tensor) -> Tensor:
        return dense.linear(x, self.weight, self.bias, self._packed)

    def call_function(self, function: Any, x: Tensor) -> Any:
        return function(x, self.weight, self.bias, self._packed)

    def forward_cpu(self, x: Tensor) -> Tensor:
        """oneDNN on weights packed by :meth:`prepare_cpu`: about twice as fast as the plain product.

        It compiles a kernel for each number of rows, and keeps them all for ever, whatever the capacity of
        its cache: prompts of many lengths would cost hundreds of MiB. So it gets to see few numbers.
        """
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        rows = x.shape[0]
        if x.ndim == 2 and (more := rounded_rows(rows) - rows):
            x = F.pad(x, (0, 0, 0, more))
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product[:rows]

    def forward_cuda(self, x: Tensor) -> Tensor:
        """A few tokens in a kernel made for reading the weight; many by the device's library."""
        if torch.compiler.is_compiling():  # the compiler writes kernels of its own
            return self.forward_native(x)
        from sgl_aspects.runtime.ops import triton_kernels

        if x.ndim != 2 or len(x) > triton_kernels.SKINNY_TOKENS or x.dtype is torch.float32:
            return F.linear(x, self.weight, self.bias)
        return triton_kernels.skinny_linear(x, self.weight, self.bias)

    def prepare_cpu(self) -> None:
        """Pack the weight for oneDNN and let go of the plain one, unless another operator uses it too."""
        if not _can_pack(self.weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, _PACKED_FOR_ROWS)
        if not self.shares_weight:
            self.weight.data = self.weight.data.new_empty(0)


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
