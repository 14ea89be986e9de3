"""SGLang's helpers that check for one vendor's hardware, and the platform's query for each."""

from __future__ import annotations

from typing import Any

from sgl_aspects import env
from sgl_aspects.engines import device_calls
from sgl_aspects.engines.sglang.bridge.platform import CPU_NAME
from sgl_aspects.platforms import current_platform
from sgl_aspects.platforms.cpu import CpuPlatform

_HELPERS = "sglang.srt.utils.common"
_SAME = ("is_cuda", "is_npu", "is_xpu", "is_hpu", "is_musa", "is_mps", "is_cuda_alike")
#: Helper → query.
GUARDS = {f"{_HELPERS}:is_hip": "is_rocm", **{f"{_HELPERS}:{name}": name for name in _SAME}}


def attach() -> None:
    """Weave as the environment configures: see :mod:`sgl_aspects.engines.device_calls`."""
    device_calls.attach(GUARDS, _platform)


def _platform() -> Any:
    """Return the platform of this process, from the variable by which SGLang chooses its own."""
    return CpuPlatform() if env.text("SGLANG_PLATFORM") == CPU_NAME else current_platform
