"""The platform class for SGLANG_PLATFORM=sgl_aspects_cpu. Importing this imports SGLang's interface."""

from __future__ import annotations

from sgl_aspects.engines.sglang.bridge.platform import bridged
from sgl_aspects.platforms.cpu import CpuPlatform


class _PlainCpu(CpuPlatform):
    """Uses native operators: SGLang's own ``forward_cpu`` needs its CPU kernels."""

    def get_dispatch_key_name(self) -> str:
        return "native"


_PlainCpu.__name__ = _PlainCpu.__qualname__ = "SGLangCpuPlatform"
SGLangCpuPlatform = bridged(_PlainCpu)
