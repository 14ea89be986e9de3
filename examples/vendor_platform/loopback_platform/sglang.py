"""The platform for real SGLang, under the method names of its version. Importing this imports SGLang."""

from __future__ import annotations

from loopback_platform.platform import LoopbackPlatform
from sgl_aspects.platforms import SRTPlatform
from sgl_aspects.platforms.sglang_bridge import bridged


class _ForSGLang(LoopbackPlatform):
    """Attention backend, pool and graph runner of the class above are those of sgl-aspects' runtime."""

    get_mha_kv_pool_cls = SRTPlatform.get_mha_kv_pool_cls
    get_graph_runner_cls = SRTPlatform.get_graph_runner_cls

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"


LoopbackSGLangPlatform = bridged(_ForSGLang)
