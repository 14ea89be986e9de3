"""A vendor's attention backends in SGLang's registry, under the names of ``get_attention_backends``."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from sgl_aspects.errors import PlatformError
from sgl_aspects.platforms.answers import answer_of, class_named, made_by, name_of
from sgl_aspects.weaving import weaver

_REGISTRY = "sglang.srt.layers.attention.attention_registry"
_BASE = "sglang.srt.layers.attention.base_attn_backend"
#: The interface that vendors derive from; other classes of the embedded engine work with its batches only.
_INTERFACE = "sgl_aspects.runtime.attention.base"


def register_when_loaded(platform: Any) -> None:
    """Add the platform's backends to SGLang's registry once it is there."""
    weaver.when_loaded(_REGISTRY, partial(_register, platform))


def _register(platform: Any, registry: Any) -> None:
    for name, named in answer_of(Mapping, platform.get_attention_backends).items():
        registry.ATTENTION_BACKENDS[name] = partial(_make, platform.get_attention_backends, named)


def _make(method: Any, named: type | str, model_runner: Any) -> Any:
    vendors = class_named(named, method, has=("init_forward_metadata", "forward_extend", "forward_decode"))
    base: Any = importlib.import_module(_BASE).AttentionBackend
    if issubclass(vendors, base):
        return vendors(model_runner)
    for each in vendors.__mro__:
        if each.__module__.startswith("sgl_aspects.runtime.") and each.__module__ != _INTERFACE:
            raise PlatformError(
                f"{name_of(method)} names {vendors.__module__}:{vendors.__qualname__}, derived from "
                f"{each.__module__}:{each.__qualname__}, which reads batches of the embedded engine: for "
                f"SGLang derive it from {_INTERFACE}:AttentionBackend, or choose another --attention-backend"
            )
    backend = type(vendors.__name__, (_Backend, base), {"__module__": vendors.__module__})()
    backend.own = made_by(method, vendors, model_runner)
    return backend


class _Backend:
    """Has the vendor's object as ``own``. SGLang's base class decides which method a step calls."""

    own: Any

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.own.init_forward_metadata(forward_batch)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Any:
        return self.own.forward_decode(*args, **kwargs)

    def forward_extend(self, *args: Any, **kwargs: Any) -> Any:
        return self.own.forward_extend(*args, **kwargs)
