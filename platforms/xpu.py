"""Intel GPUs, through ``torch.xpu``."""

from __future__ import annotations

from typing import ClassVar

from sgl_aspects.platforms.identity import PlatformEnum
from sgl_aspects.platforms.srt_platform import SRTPlatform
from sgl_aspects.platforms.torch_device import TorchDeviceMixin


class XpuDeviceMixin(TorchDeviceMixin):
    _enum: ClassVar[PlatformEnum] = PlatformEnum.XPU
    device_name: ClassVar[str] = "xpu"
    device_type: ClassVar[str] = "xpu"
    visible_devices_variable: ClassVar[str | None] = "ZE_AFFINITY_MASK"
    distributed_backend: ClassVar[str] = "xccl"
    profiler_activity: ClassVar[str | None] = "XPU"


class XpuPlatform(XpuDeviceMixin, SRTPlatform):
    """The embedded runtime on Intel GPUs. Triton's kernels are not declared: none has run."""

    def get_default_attention_backend(self) -> str:
        return "torch_native"
