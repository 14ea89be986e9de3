"""The attention backends, by the name that ``ServerArgs.attention_backend`` takes."""

from __future__ import annotations

from typing import Any

from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import current_platform, resolve_qualified_name

ATTENTION_BACKENDS: dict[str, str | type] = {
    "torch_native": "sgl_aspects.runtime.attention.torch_native:TorchNativeBackend",
    "triton": "sgl_aspects.runtime.attention.triton_backend:TritonBackend",
}


def attention_backend_class(name: str) -> Any:
    """The class; the platform's own backends come beside ours. ConfigError names the choices."""
    backends = {**ATTENTION_BACKENDS, **current_platform.get_attention_backends()}
    if name not in backends:
        raise ConfigError(f"attention_backend={name!r}: choose one of {', '.join(sorted(backends))}")
    return resolve_qualified_name(backends[name])
