"""The CPU: always available, and chosen last."""

from __future__ import annotations

import platform as host
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

from sgl_aspects.platforms import host_memory
from sgl_aspects.platforms.device_mixin import DeviceMixin
from sgl_aspects.platforms.events import ClockEvent, DeviceEvent
from sgl_aspects.platforms.identity import PlatformEnum
from sgl_aspects.platforms.srt_platform import SRTPlatform

if TYPE_CHECKING:
    import torch


class CpuDeviceMixin(DeviceMixin):
    """The host's processors as one device. Work is done when a call returns, so nothing ever waits."""

    _enum: ClassVar[PlatformEnum] = PlatformEnum.CPU
    device_name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"

    def device_count(self) -> int:
        return 1

    def get_device(self, local_rank: int) -> torch.device:
        import torch

        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"set_device({device}): the CPU platform has only torch.device('cpu')")

    def get_device_name(self, device_id: int = 0) -> str:
        return _processor_name() or host.machine()

    def get_device_uuid(self, device_id: int = 0) -> str:
        """The host's: derived from its network address (:func:`uuid.getnode`)."""
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{uuid.getnode():012x}"))

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return host_memory.available_and_total()[1]

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """(free, total) bytes of the host, or of the cgroup where that is less."""
        return host_memory.available_and_total()

    def shares_host_memory(self) -> bool:
        return True

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        """The most bytes that this process has had resident."""
        return float(host_memory.peak_resident())

    def empty_cache(self) -> None:
        """Nothing to do: torch keeps no cache of CPU memory."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def create_event(self) -> DeviceEvent:
        return ClockEvent()

    def current_stream(self) -> Any:
        return None

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """The embedded runtime on the CPU."""

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "cpu"


def _processor_name() -> str:
    """The model name from /proc/cpuinfo on Linux, from the standard library elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:  # not Linux
        return host.processor()
    return host.processor()
