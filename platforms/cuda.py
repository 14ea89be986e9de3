"""NVIDIA GPUs, through ``torch.cuda``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from sgl_aspects.platforms.device_mixin import DeviceMixin
from sgl_aspects.platforms.events import DeviceEvent
from sgl_aspects.platforms.identity import DeviceCapability, PlatformCapabilities, PlatformEnum
from sgl_aspects.platforms.srt_platform import SRTPlatform

if TYPE_CHECKING:
    import torch


class CudaEvent(DeviceEvent):
    """A timed ``torch.cuda.Event``: recording it costs the host a launch, reading it waits for nothing."""

    __slots__ = ("_event", "_recorded")

    def __init__(self) -> None:
        import torch

        self._event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._recorded = False

    def record(self, stream: Any = None) -> None:
        self._event.record(stream)
        self._recorded = True

    def query(self) -> bool:
        # torch answers True for an event that was never recorded.
        return self._recorded and bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_ms(self, end: DeviceEvent) -> float:
        if not isinstance(end, CudaEvent):
            raise TypeError(f"elapsed_ms takes another CudaEvent, not {type(end).__qualname__}")
        if not (self._recorded and end._recorded):
            which = "end" if self._recorded else "first"
            raise RuntimeError(
                f"The {which} event was never recorded: call record() on both before elapsed_ms()."
            )
        return float(self._event.elapsed_time(end._event))


class CudaDeviceMixin(DeviceMixin):
    """One or more GPUs that answer through ``torch.cuda``."""

    _enum: ClassVar[PlatformEnum] = PlatformEnum.CUDA
    device_name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"

    def device_count(self) -> int:
        import torch

        return torch.cuda.device_count()

    def get_device(self, local_rank: int) -> torch.device:
        import torch

        count = torch.cuda.device_count()
        if not 0 <= local_rank < count:
            raise ValueError(
                f"get_device({local_rank}): this process sees {count} {self.device_name} device(s), "
                f"so a local rank is 0 to {count - 1}. CUDA_VISIBLE_DEVICES decides which are seen."
            )
        return torch.device(self.device_type, local_rank)

    def set_device(self, device: torch.device) -> None:
        import torch

        torch.cuda.set_device(device)

    def get_device_name(self, device_id: int = 0) -> str:
        import torch

        return str(torch.cuda.get_device_name(device_id))

    def get_device_uuid(self, device_id: int = 0) -> str:
        import torch

        return f"GPU-{torch.cuda.get_device_properties(device_id).uuid}"

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        import torch

        return DeviceCapability(*torch.cuda.get_device_capability(device_id))

    def get_device_total_memory(self, device_id: int = 0) -> int:
        import torch

        return int(torch.cuda.get_device_properties(device_id).total_memory)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """(free, total) bytes as the driver sees them: what torch has cached counts as used."""
        import torch

        free, total = torch.cuda.mem_get_info(device_id)
        return int(free), int(total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        import torch

        return float(torch.cuda.max_memory_allocated(device))

    def empty_cache(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def is_pin_memory_available(self) -> bool:
        return True

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def create_event(self) -> DeviceEvent:
        return CudaEvent()

    def current_stream(self) -> Any:
        import torch

        return torch.cuda.current_stream()

    def is_capturing(self) -> bool:
        import torch

        return bool(torch.cuda.is_current_stream_capturing())

    def get_torch_distributed_backend_str(self) -> str:
        return "nccl"

    def get_profiler_activities(self) -> list[Any]:
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU, ProfilerActivity.CUDA]


class CudaPlatform(CudaDeviceMixin, SRTPlatform):
    """The embedded runtime on NVIDIA GPUs. Graph capture is not declared yet."""

    capabilities: ClassVar[PlatformCapabilities] = PlatformCapabilities(
        supports_triton=True, supports_pynccl=True
    )

    def get_default_attention_backend(self) -> str:
        return "torch_native"
