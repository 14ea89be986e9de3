"""Ascend NPUs, through ``torch.npu``, which the package ``torch_npu`` adds."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from sgl_aspects.platforms.identity import PlatformEnum
from sgl_aspects.platforms.srt_platform import SRTPlatform
from sgl_aspects.platforms.torch_device import TorchDeviceMixin


class NpuDeviceMixin(TorchDeviceMixin):
    _enum: ClassVar[PlatformEnum] = PlatformEnum.NPU
    device_name: ClassVar[str] = "npu"
    device_type: ClassVar[str] = "npu"
    torch_extension: ClassVar[str | None] = "torch_npu"
    visible_devices_variable: ClassVar[str | None] = "ASCEND_RT_VISIBLE_DEVICES"
    distributed_backend: ClassVar[str] = "hccl"

    def get_profiler_activities(self) -> list[Any]:
        """torch_npu has a profiler, and activities, of its own; without them the host's alone."""
        profiler = getattr(sys.modules.get("torch_npu"), "profiler", None)
        if profiler is None:
            return super().get_profiler_activities()
        return [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.NPU]


class NpuPlatform(NpuDeviceMixin, SRTPlatform):
    """The embedded runtime on Ascend NPUs."""

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "npu"
