"""Intel Gaudi, through ``torch.hpu``, which the package ``habana_frameworks`` adds."""

from __future__ import annotations

from typing import ClassVar

from sgl_aspects.platforms.identity import PlatformEnum
from sgl_aspects.platforms.srt_platform import SRTPlatform
from sgl_aspects.platforms.torch_device import TorchDeviceMixin


class HpuDeviceMixin(TorchDeviceMixin):
    _enum: ClassVar[PlatformEnum] = PlatformEnum.HPU
    device_name: ClassVar[str] = "hpu"
    device_type: ClassVar[str] = "hpu"
    torch_extension: ClassVar[str | None] = "habana_frameworks.torch.core"
    visible_devices_variable: ClassVar[str | None] = "HABANA_VISIBLE_MODULES"
    distributed_backend: ClassVar[str] = "hccl"
    profiler_activity: ClassVar[str | None] = "HPU"

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return self.get_available_memory(device_id)[1]

    def empty_cache(self) -> None:
        """Nothing to do: Gaudi's allocator has no call for it."""

    def seed_everything(self, seed: int | None = None) -> None:
        super().seed_everything(seed)
        if seed is not None:
            self.torch_module.manual_seed_all(seed)  # torch.manual_seed does not cover this device


class HpuPlatform(HpuDeviceMixin, SRTPlatform):
    """The embedded runtime on Gaudi."""

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "hpu"
