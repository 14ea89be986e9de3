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
#: Where SGLang chooses how a layer with latent keys and values is computed, by the backend's name.
_LATENT = "sglang.srt.models.deepseek_common.attention_backend_handler"
#: The interface that vendors derive from; other classes of the embedded engine work with its batches only.
_INTERFACE = "sgl_aspects.runtime.attention.base"


def register_when_loaded(platform: Any) -> None:
    """Add the platform's backends to SGLang's registries once these are there."""
    weaver.when_loaded(_REGISTRY, partial(_register, platform))
    weaver.when_loaded(_LATENT, partial(_choose_latent_rows, platform))


def _register(platform: Any, registry: Any) -> None:
    for name, named in answer_of(Mapping, platform.get_attention_backends).items():
        registry.ATTENTION_BACKENDS[name] = partial(_make, platform.get_attention_backends, named)


def _choose_latent_rows(platform: Any, handlers: Any) -> None:
    """Give the platform's backends the rows that the pool keeps, in prompts too: for names that it does not
    know SGLang expands a prompt's keys and values for every head.
    """
    for name in answer_of(Mapping, platform.get_attention_backends):
        handlers.AttentionBackendRegistry.register(name, lambda *_: handlers.AttnForwardMethod.MLA)


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
    kind = "mla" if getattr(model_runner, "use_mla_backend", False) else "mha"
    if kind not in (kinds := getattr(vendors, "kinds", ("mha",))):
        raise PlatformError(
            f"{name_of(method)} names {vendors.__module__}:{vendors.__qualname__}, whose kinds are "
            f"{', '.join(kinds)}, and this model's key-value cache is of kind {kind}: choose another "
            f"--attention-backend, or add {kind} to the kinds of that class once it reads such rows"
        )
    backend = type(vendors.__name__, (_Backend, base), {"__module__": vendors.__module__})()
    backend.own = made_by(method, vendors, model_runner)
    backend.token_to_kv_pool = model_runner.token_to_kv_pool
    backend.req_to_token_pool = model_runner.req_to_token_pool
    return backend


class _Backend:
    """Has the vendor's object as ``own``, and the pools, which SGLang's models take from the backend.

    SGLang's base class decides which method a step calls.
    """

    own: Any
    token_to_kv_pool: Any
    req_to_token_pool: Any

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.own.init_forward_metadata(forward_batch)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Any:
        return self.own.forward_decode(*args, **kwargs)

    def forward_extend(self, *args: Any, **kwargs: Any) -> Any:
        return self.own.forward_extend(*args, **kwargs)
