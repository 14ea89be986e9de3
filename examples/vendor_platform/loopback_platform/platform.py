"""The device's platform classes: one for text engines, one for images and video."""

from __future__ import annotations

import torch

from loopback_platform.device import LoopbackDevice
from sgl_aspects.platforms import MMPlatform, PlatformCapabilities, SRTPlatform


class LoopbackPlatform(LoopbackDevice, SRTPlatform):
    # Declare only what works: nothing that is not declared is used.
    capabilities = PlatformCapabilities(graph_capture=True)

    def init_backend(self) -> None:
        from loopback_platform.operators import register

        register()

    def get_default_attention_backend(self) -> str:
        return "loopback"

    def get_attention_backends(self) -> dict[str, type | str]:
        return {"loopback": "loopback_platform.attention:LoopbackAttention"}

    def get_graph_runner_cls(self) -> type | str:
        # The engine's own captures with create_graph(); its attention backend must be capturable.
        return "sgl_aspects.runtime.execution.graph_runner:GraphRunner"

    def get_compile_backend(self, mode: str | None = None) -> str:
        # torch traces the layers and runs them as they are. A real device names its own compiler.
        return "eager"

    def get_mha_kv_pool_cls(self) -> type | str:
        return "loopback_platform.kv_pool:LoopbackTokenPool"

    def get_dispatch_key_name(self) -> str:
        return "loopback"


class LoopbackMMPlatform(LoopbackDevice, MMPlatform):
    def get_available_attn_backends(self) -> tuple[str, ...]:
        return ("torch_sdpa",)

    def get_attn_backend_cls_str(
        self, selected_backend: str | None, head_size: int, dtype: torch.dtype
    ) -> str:
        if selected_backend not in (None, *self.get_available_attn_backends()):
            raise ValueError(f"loopback has no attention {selected_backend!r}, only torch_sdpa")
        return "sglang.multimodal_gen.runtime.layers.attention.backends.sdpa.SDPABackend"
