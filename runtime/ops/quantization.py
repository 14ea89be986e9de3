"""Quantization of the linears' weights, layer by layer.

``ServerArgs.quantization`` names the method. The platform checks that its device can run it
(``verify_quantization``), and may name its own class for it (``get_quantization_config``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import SRTPlatform
from sgl_aspects.platforms.answers import class_of, made_by
from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.ops import Linear

#: Method → the type that weights are kept in.
WEIGHT_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class WeightOnly:
    """The built-in quantization: works on every torch device that has the type.

    A platform's class for SGLang and this engine has the method of this one, and is made without arguments.
    """

    def __init__(self, method: str) -> None:
        if method not in WEIGHT_TYPES:
            raise ConfigError(f"quantization={method!r}: choose one of {', '.join(WEIGHT_TYPES)}")
        self.dtype = WEIGHT_TYPES[method]

    def get_quant_method(self, layer: nn.Module, prefix: str) -> RowScaled | None:
        """Return what computes the linear ``layer`` called ``prefix``; None: it is not quantized."""
        return RowScaled(self.dtype)


class RowScaled:
    """Keeps a weight in ``dtype``, of 8 bits, each row as a share of its largest number."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        """Called once ``layer.weight`` [out_features, in_features] is loaded: replace it."""
        dtype = self.dtype
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        exact = layer.weight.float()
        largest = exact.abs().amax(dim=1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
        scale = largest / info.max
        shares = exact / scale if dtype.is_floating_point else (exact / scale).round()
        layer.scale = scale.squeeze(1)
        layer.weight = nn.Parameter(shares.to(dtype), requires_grad=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in_features] → [..., out_features]."""
        return dispatch.scaled_linear(x, layer.weight, layer.scale, bias)


def quantization_config(method: str, platform: SRTPlatform) -> Any:
    """Make the quantizer of ``method``: the platform's own, or the built-in one.

    ConfigError if the device cannot run it.
    """
    try:
        platform.verify_quantization(method)
    except ValueError as error:
        raise ConfigError(f"quantization={method!r}: {error}") from error
    factory = platform.get_quantization_config
    found = class_of(factory, method, usual=WeightOnly, has=("get_quant_method",))
    return WeightOnly(method) if found is WeightOnly else made_by(factory, found)


def quantize(model: nn.Module, config: Any) -> None:
    """Quantize all linears except the head and gates, where an error changes tokens directly."""
    for prefix, layer in model.named_modules():
        if isinstance(layer, Linear) and prefix != "lm_head" and not layer.keeps_precision:
            layer.quant_method = config.get_quant_method(layer, prefix)
            if layer.quant_method is not None:
                layer.quant_method.process_weights_after_loading(layer)
