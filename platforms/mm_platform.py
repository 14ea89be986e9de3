"""MMPlatform: what a multimodal (image and video generation) engine needs from its platform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_aspects.platforms.device_mixin import DeviceMixin

if TYPE_CHECKING:
    import torch


class MMPlatform(DeviceMixin):
    """The base of every platform that serves images and video. Mix it with the same device mixin as SRT's."""

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Set the values left open in ``server_args``, before the engine reads it."""

    def init_backend(self) -> None:
        """Called once in each worker process, before the first tensor is made. Nothing by default."""

    def get_attn_backend_cls_str(
        self, selected_backend: str | None, head_size: int, dtype: torch.dtype
    ) -> str:
        """The qualified name of the attention class for heads of ``head_size`` elements of ``dtype``.

        ``selected_backend``: the user's choice or None; ValueError if the device does not support it.
        """
        self._not_implemented("get_attn_backend_cls_str")

    def get_available_attn_backends(self) -> tuple[str, ...]:
        """The backends that a user may select, the default first."""
        self._not_implemented("get_available_attn_backends")

    def optimize_vae(self, vae: torch.nn.Module) -> torch.nn.Module:
        """The image decoder in the form that suits the device; by default as it is."""
        return vae

    def get_compile_backend(self, mode: str | None = None) -> str:
        """The backend's name for ``torch.compile(backend=…)``."""
        self._not_implemented("get_compile_backend")

    def get_dispatch_key_name(self) -> str:
        """The dispatch key, for which implementations of operators are registered."""
        return "native"

    # -- capabilities: none, unless declared -----------------------------------------------------------

    def is_amp_supported(self) -> bool:
        """True if ``torch.autocast`` works."""
        return False

    def is_float64_supported(self) -> bool:
        return False
