"""SGLang's platform interface of older and newer versions, as fakes, and a bridge to them."""

from __future__ import annotations

from typing import Any

from sgl_aspects.platforms import SRTPlatform
from sgl_aspects.platforms.sglang_bridge import bridged
from tests.support.stand_ins import Engine

DEVICE_MIXIN = """
    import enum
    from typing import NamedTuple
    class PlatformEnum(enum.Enum):
        CPU = 1
        OOT = 2
    class CpuArchEnum(enum.Enum):
        X86 = 7
        ARM = 8
        UNSPECIFIED = 9
    class DeviceCapability(NamedTuple):
        major: int
        minor: int
    class DeviceMixin:
        def is_out_of_tree(self):
            return self._enum is PlatformEnum.OOT
    """
OLD = """
    from sglang.srt.platforms.device_mixin import DeviceMixin
    class SRTPlatform(DeviceMixin):
        def get_mha_kv_pool_cls(self):
            raise NotImplementedError
        def get_mla_kv_pool_cls(self):
            raise NotImplementedError
        def get_dsa_kv_pool_cls(self):
            raise NotImplementedError
        def get_paged_allocator_cls(self):
            raise NotImplementedError
        def get_graph_runner_cls(self):
            raise NotImplementedError
    """
NEW = """
    from sglang.srt.platforms.device_mixin import DeviceMixin
    class PlatformCapabilities:
        __annotations__ = {"graph_capture": bool, "piecewise_graph": bool, "supports_triton": bool}
        def __init__(self, **given):
            self.given = given
    class SRTPlatform(DeviceMixin):
        capabilities = PlatformCapabilities()
        def get_kv_pool_cls(self, *, kind):
            return None
        def get_graph_runner_cls(self):
            return None
        def get_paged_allocator_cls(self):
            return None
    """
IN_TREE = {
    "mem_cache/memory_pool.py": "".join(
        f"class {kind}TokenToKVPool:\n    def _create_buffers_normal(self): ...\n"
        for kind in ("MHA", "MLA", "DSA")
    ),
    "mem_cache/allocator.py": "class PagedTokenToKVPoolAllocator: ...\n",
}


def bridge(engine: Engine, interface: str, platform: type[SRTPlatform]) -> Any:
    engine.write("sglang/srt/platforms/device_mixin.py", DEVICE_MIXIN)
    engine.write("sglang/srt/platforms/interface.py", interface)
    for path, text in IN_TREE.items():
        engine.write(f"sglang/srt/{path}", text)
    return bridged(platform)()
