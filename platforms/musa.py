"""Moore Threads GPUs, through ``torch.musa``, which the package ``torch_musa`` adds."""

from __future__ import annotations

from typing import ClassVar

from sgl_aspects.platforms.identity import DeviceCapability, PlatformEnum
from sgl_aspects.platforms.srt_platform import SRTPlatform
from sgl_aspects.platforms.torch_device import TorchDeviceMixin


class MusaDeviceMixin(TorchDeviceMixin):
    _enum: ClassVar[PlatformEnum] = PlatformEnum.MUSA
    device_name: ClassVar[str] = "musa"
    device_type: ClassVar[str] = "musa"
    torch_extension: ClassVar[str | None] = "torch_musa"
    visible_devices_variable: ClassVar[str | None] = "MUSA_VISIBLE_DEVICES"
    distributed_backend: ClassVar[str] = "mccl"
    profiler_activity: ClassVar[str | None] = "MUSA"

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        return DeviceCapability(*self.torch_module.get_device_capability(device_id))


class MusaPlatform(MusaDeviceMixin, SRTPlatform):
    """The embedded runtime on Moore Threads GPUs."""

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "musa"
