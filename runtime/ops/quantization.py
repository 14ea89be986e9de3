"""Quantization of the linears' weights, layer by layer, by a class of the platform's.

``ServerArgs.quantization`` names the method. The platform checks that its device can run it
(``verify_quantization``), and names the class (``get_quantization_config``).
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import SRTPlatform
from sgl_aspects.platforms.answers import answer_of, class_named, made_by
from sgl_aspects.runtime.ops import Linear


class QuantizationConfig(Protocol):
    """A class of this interface is made without arguments, and serves SGLang, too."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethod | None:
        """Return what computes the linear ``layer`` called ``prefix``; None: it is not quantized."""


class LinearMethod(Protocol):
    """Computes one linear with a weight of its own form."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Called once ``layer.weight`` [out_features, in_features] is loaded: replace it."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in_features] → [..., out_features]."""


def quantization_config(method: str, platform: SRTPlatform) -> Any:
    """Make the platform's quantizer of ``method``.

    ConfigError if the device cannot run it, or the platform names no class for it.
    """
    try:
        platform.verify_quantization(method)
    except ValueError as error:
        raise ConfigError(f"quantization={method!r}: {error}") from error
    factory = platform.get_quantization_config
    named: Any = answer_of(object, factory, method)
    if named is None:
        raise ConfigError(
            f"quantization={method!r}: platform {platform.device_name!r} names no class for it "
            "(get_quantization_config). Leave it out, or use an engine that has methods of its own"
        )
    return made_by(factory, class_named(named, factory, has=("get_quant_method",)))


def quantize(model: nn.Module, config: Any) -> None:
    """Quantize all linears except the head and gates, where an error changes tokens directly."""
    for prefix, layer in model.named_modules():
        if isinstance(layer, Linear) and prefix != "lm_head" and not layer.keeps_precision:
            layer.quant_method = config.get_quant_method(layer, prefix)
            if layer.quant_method is not None:
                layer.quant_method.process_weights_after_loading(layer)
