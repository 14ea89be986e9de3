"""The platform for real SGLang, under the method names of its version. Importing this imports SGLang."""

from __future__ import annotations

from loopback_platform.platform import LoopbackPlatform
from sgl_aspects.platforms import SRTPlatform
from sgl_aspects.platforms.sglang_bridge import bridged


class _ForSGLang(LoopbackPlatform):
    """The attention backend and the pool above are written for sgl-aspects' runtime: SGLang has its own."""

    get_mha_kv_pool_cls = SRTPlatform.get_mha_kv_pool_cls

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"


LoopbackSGLangPlatform = bridged(_ForSGLang)
