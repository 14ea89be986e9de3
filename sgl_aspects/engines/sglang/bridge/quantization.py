"""A vendor's quantization in SGLang: its class gives each linear layer the method that computes it.

A class derived from SGLang's ``QuantizationConfig`` is handed over as it is. Of any other one is made whose
weights are loaded as they are saved, and then given to the vendor's method.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from sgl_aspects.errors import PlatformError
from sgl_aspects.platforms.answers import made_by, name_of
from sgl_aspects.weaving import weaver

_PACKAGE = "sglang.srt.layers.quantization"
#: The names that the command line takes; elsewhere in versions before 0.5.23.
_CHOICES = "sglang.srt.arg_groups.choices"


def register_when_loaded(platform: Any) -> None:
    """Add the platform's methods to SGLang's table and choices: it refuses names that are not there."""
    weaver.when_loaded(_PACKAGE, partial(_register, platform))
    weaver.when_loaded(_CHOICES, partial(_add_choices, platform))


def _register(platform: Any, package: Any) -> None:
    for name in _names(platform):
        # The table's own entry is used where the platform has no class, which it has for these.
        package.QUANTIZATION_METHODS.setdefault(name, None)


def _add_choices(platform: Any, choices: Any) -> None:
    listed = choices.QUANTIZATION_CHOICES
    listed.extend(name for name in _names(platform) if name not in listed)


def _names(platform: Any) -> list[str]:
    named = platform.supported_quantization
    return [name for name in named if platform.get_quantization_config(name) is not None]


def config_class(vendors: type, factory: Callable[..., Any]) -> type:
    """Return ``vendors``, the class that ``factory`` named, as a class that SGLang takes.

    :raises PlatformError: it has no ``get_quant_method``.
    """
    base: Any = importlib.import_module(f"{_PACKAGE}.base_config").QuantizationConfig
    if issubclass(vendors, base):
        return vendors
    if not hasattr(vendors, "get_quant_method"):
        raise PlatformError(
            f"{name_of(factory)} names {vendors.__module__}:{vendors.__qualname__}, which has no "
            f"get_quant_method(layer, prefix): SGLang quantizes layer by layer"
        )
    members = {"vendors": vendors, "factory": staticmethod(factory), "__module__": vendors.__module__}
    return type(vendors.__name__, (_Config, base), members)


class _Config:
    """Has the vendor's object as ``own``."""

    vendors: ClassVar[type]
    factory: ClassVar[Callable[..., Any]]

    def __init__(self) -> None:
        super().__init__()
        self.own = made_by(self.factory, self.vendors)

    def get_name(self) -> str:
        return self.vendors.__name__

    def get_supported_act_dtypes(self) -> list[Any]:
        import torch

        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 0: the platform's ``verify_quantization`` decides."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls()

    def get_scaled_act_names(self) -> list[str]:
        return []

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return the vendor's method for a linear layer, or SGLang's for one that is not quantized."""
        linear = importlib.import_module("sglang.srt.layers.linear")
        if not isinstance(layer, linear.LinearBase):
            return None
        plain = importlib.import_module(f"{_PACKAGE}.unquant").UnquantizedLinearMethod
        method = self.own.get_quant_method(layer, prefix)
        if method is None:
            return plain()
        made = type(type(method).__name__, (_Method, plain), {})()
        made.own = method
        return made


class _Method:
    """Weights are made and loaded as SGLang does without quantization; the rest is the vendor's."""

    own: Any

    def process_weights_after_loading(self, layer: Any) -> None:
        self.own.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
        return self.own.apply(layer, x, bias)
