"""Weight-only quantization: linears keep their weights in 8 bits, with one scale for each row.

``ServerArgs.quantization`` names the method. The platform checks that its device can run it
(``verify_quantization``), and may name its own class for it (``get_quantization_config``), which is made with
the method's name and has ``quantize(model)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import SRTPlatform
from sgl_aspects.platforms.answers import class_of
from sgl_aspects.runtime.ops import Linear

#: Method → the type that weights are kept in.
WEIGHT_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class WeightOnly:
    """The built-in quantization: works on every torch device that has the type."""

    def __init__(self, method: str) -> None:
        if method not in WEIGHT_TYPES:
            raise ConfigError(f"quantization={method!r}: choose one of {', '.join(WEIGHT_TYPES)}")
        self.dtype = WEIGHT_TYPES[method]

    def quantize(self, model: nn.Module) -> None:
        """Quantize all linears of 16 or 32 bits except the head, where an error changes tokens directly."""
        for name, module in model.named_modules():
            if isinstance(module, Linear) and name != "lm_head" and not module.keeps_precision:
                module.quantize(self.dtype)


def quantization_config(method: str, platform: SRTPlatform) -> Any:
    """Make the quantizer of ``method``: the platform's own, or the built-in one.

    ConfigError if the device cannot run it.
    """
    try:
        platform.verify_quantization(method)
    except ValueError as error:
        raise ConfigError(f"quantization={method!r}: {error}") from error
    return class_of(platform.get_quantization_config, method, usual=WeightOnly, has=("quantize",))(method)
