"""The device itself. It inherits from the host's processors, on which the tensors really are."""

from __future__ import annotations

import os
import uuid
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import psutil
import torch

from loopback_platform.graph import LoopbackGraph, is_capturing
from loopback_platform.streams import LoopbackEvent, LoopbackStream, current_stream, use_stream
from sgl_aspects.platforms import DeviceCapability, DeviceEvent, DeviceGraph, DeviceMixin, PlatformEnum
from sgl_aspects.platforms.host_memory import peak_resident


class LoopbackDevice(DeviceMixin):
    """Two devices, unless LOOPBACK_VISIBLE_DEVICES is set."""

    _enum = PlatformEnum.OOT
    device_name = "loopback"
    #: torch's name of the device. A real one has its own ("npu"), from an extension of torch.
    device_type = "cpu"
    visible_devices_variable = "LOOPBACK_VISIBLE_DEVICES"

    # -- devices --------------------------------------------------------------------------------------

    def _visible(self) -> list[str]:
        value = os.environ.get(self.visible_devices_variable, "0,1")
        return [part.strip() for part in value.split(",") if part.strip()]

    def device_count(self) -> int:
        return len(self._visible())

    def get_device(self, local_rank: int) -> torch.device:
        if not 0 <= local_rank < self.device_count():
            raise ValueError(
                f"get_device({local_rank}): LOOPBACK_VISIBLE_DEVICES shows {self.device_count()} device(s)"
            )
        return torch.device("cpu")

    def set_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(f"set_device({device}): a loopback device is a torch.device('cpu')")

    def get_device_name(self, device_id: int = 0) -> str:
        return f"Loopback L{100 + int(self._visible()[device_id])}"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"loopback {self._visible()[device_id]}"))

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        return DeviceCapability(1, 0)

    # -- memory: this process's resident bytes, of a declared total ------------------------------------

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(os.environ.get("LOOPBACK_MEMORY_MIB", "4096")) * 2**20

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        total = self.get_device_total_memory(device_id)
        return max(total - psutil.Process().memory_info().rss, 0), total

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        return float(peak_resident())

    def empty_cache(self) -> None:
        """The host's allocator gives large blocks back by itself."""

    # -- running --------------------------------------------------------------------------------------

    def is_asynchronous(self) -> bool:
        return True

    def synchronize(self) -> None:
        current_stream().synchronize()

    def create_event(self) -> DeviceEvent:
        return LoopbackEvent()

    def current_stream(self) -> Any:
        return current_stream()

    def create_stream(self) -> Any:
        return LoopbackStream()

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else use_stream(stream)

    def create_graph(self) -> DeviceGraph:
        return LoopbackGraph()

    def is_capturing(self) -> bool:
        return is_capturing()

    def get_torch_distributed_backend_str(self) -> str:
        return "gloo"
