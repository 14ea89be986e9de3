"""Apple GPUs, through ``torch.mps``. One device, which shares the host's memory."""

from __future__ import annotations

import platform as host
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from sgl_aspects.platforms.identity import PlatformEnum
from sgl_aspects.platforms.srt_platform import SRTPlatform
from sgl_aspects.platforms.torch_device import TorchDeviceMixin

if TYPE_CHECKING:
    import torch


class MpsDeviceMixin(TorchDeviceMixin):
    _enum: ClassVar[PlatformEnum] = PlatformEnum.MPS
    device_name: ClassVar[str] = "mps"
    device_type: ClassVar[str] = "mps"
    #: There is no library of collectives for this device: tensors go over the host.
    distributed_backend: ClassVar[str] = "gloo"

    def set_device(self, device: torch.device) -> None:
        if device.type != "mps":
            raise ValueError(f"set_device({device}): the MPS platform has only torch.device('mps')")

    def get_device_name(self, device_id: int = 0) -> str:
        return f"Apple {host.machine()}"

    def get_device_uuid(self, device_id: int = 0) -> str:
        self._not_implemented("get_device_uuid")

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """Metal's recommended limit for the memory that it shares with the host."""
        return int(self.torch_module.recommended_max_memory())

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        total = self.get_device_total_memory()
        return max(total - int(self.torch_module.driver_allocated_memory()), 0), total

    def shares_host_memory(self) -> bool:
        return True

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        """The present allocation of tensors: torch keeps no peak for this device."""
        return float(self.torch_module.current_allocated_memory())

    def is_pin_memory_available(self) -> bool:
        return False

    def current_stream(self) -> Any:
        return None

    def create_stream(self) -> Any:
        return None

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cpu")  # where gloo works


class MpsPlatform(MpsDeviceMixin, SRTPlatform):
    """The embedded runtime on Apple GPUs."""

    def get_default_attention_backend(self) -> str:
        return "torch_native"
