"""The attention backends, by the name that ``ServerArgs.attention_backend`` takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import current_platform
from sgl_aspects.platforms.answers import answer_of, class_named, name_of

logger = logging.getLogger(__name__)

ATTENTION_BACKENDS: dict[str, str | type] = {
    "torch_native": "sgl_aspects.runtime.attention.torch_native:TorchNativeBackend",
    "triton": "sgl_aspects.runtime.attention.triton_backend:TritonBackend",
}


def attention_backend_class(name: str, whose: str = "attention_backend") -> Any:
    """Return the class; the platform's own backends are included. ConfigError names the choices, and
    ``whose`` name it is.
    """
    backends = _backends()
    if name not in backends:
        raise ConfigError(f"{whose}={name!r}: choose one of {', '.join(sorted(backends))}")
    return class_named(
        backends[name], current_platform.get_attention_backends, has=("init_forward_metadata", "forward")
    )


def _backends() -> dict[str, str | type]:
    return {**ATTENTION_BACKENDS, **answer_of(Mapping, current_platform.get_attention_backends)}


def choose_attention_backend(wanted: str | None, kind: str) -> Any:
    """Return the class for pools of ``kind``: the user's choice, or the platform's default.

    ConfigError if the user's choice cannot read such a pool. If the default cannot, the reference is used,
    and logged.
    """
    default = current_platform.get_default_attention_backend
    name = wanted or answer_of(str, default)
    chosen = attention_backend_class(name, "attention_backend" if wanted else name_of(default))
    if kind in _kinds(chosen):
        return chosen
    if wanted is not None:
        able = [other for other in sorted(_backends()) if kind in _kinds(attention_backend_class(other))]
        raise ConfigError(
            f"attention_backend={wanted!r} cannot read this model's key-value cache, which is of kind "
            f"{kind!r}: choose one of {', '.join(able)}"
        )
    logger.info("attention backend %s has no pools of kind %r: using torch_native", name, kind)
    return attention_backend_class("torch_native")


def _kinds(backend: Any) -> frozenset[str]:
    """A class of SGLang's declares none."""
    kinds: frozenset[str] = getattr(backend, "kinds", frozenset({"mha"}))
    return kinds
