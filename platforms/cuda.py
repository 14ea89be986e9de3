"""NVIDIA GPUs, through ``torch.cuda``."""

from __future__ import annotations

import ctypes
import importlib.util
from functools import lru_cache
from typing import Any, ClassVar

from sgl_aspects.platforms.events import DeviceEvent
from sgl_aspects.platforms.graphs import DeviceGraph, TorchGraph
from sgl_aspects.platforms.identity import DeviceCapability, PlatformCapabilities, PlatformEnum
from sgl_aspects.platforms.srt_platform import SRTPlatform
from sgl_aspects.platforms.torch_device import TorchDeviceMixin, TorchEvent


class CudaEvent(TorchEvent):
    """An event that C code records through the driver."""

    __slots__ = ()

    def recorder(self) -> tuple[int, int, int] | None:
        functions = _driver()
        if functions is None:
            return None
        if not self._event.cuda_event:
            self._event.record()  # torch makes it when it is recorded first
        return (*functions, self._event.cuda_event)


@lru_cache(maxsize=1)
def _driver() -> tuple[int, int] | None:
    """The addresses of ``cuEventRecord`` and ``cuEventElapsedTime``; None if torch has other events."""
    import torch

    if torch.version.cuda is None:
        return None  # torch.cuda drives other GPUs, such as AMD's
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        # The second version, of CUDA 12.8, does not query both events first, which took 3 µs.
        elapsed = getattr(driver, "cuEventElapsedTime_v2", None) or driver.cuEventElapsedTime
        record = driver.cuEventRecord
    except (OSError, AttributeError):
        return None
    return _address(record), _address(elapsed)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class CudaDeviceMixin(TorchDeviceMixin):
    """One or more GPUs that answer through ``torch.cuda``."""

    _enum: ClassVar[PlatformEnum] = PlatformEnum.CUDA
    device_name: ClassVar[str] = "cuda"
    device_type: ClassVar[str] = "cuda"
    visible_devices_variable: ClassVar[str | None] = "CUDA_VISIBLE_DEVICES"
    distributed_backend: ClassVar[str] = "nccl"
    profiler_activity: ClassVar[str | None] = "CUDA"

    def get_device_uuid(self, device_id: int = 0) -> str:
        return f"GPU-{super().get_device_uuid(device_id)}"

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        return DeviceCapability(*self.torch_module.get_device_capability(device_id))

    def create_event(self) -> DeviceEvent:
        return CudaEvent(self.torch_module.Event(enable_timing=True))

    def stream_handle(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def create_graph(self) -> DeviceGraph:
        module = self.torch_module
        return TorchGraph(module.CUDAGraph(), module.graph)


class CudaPlatform(CudaDeviceMixin, SRTPlatform):
    """The embedded runtime on NVIDIA GPUs, with kernels in Triton where Triton is installed."""

    capabilities: ClassVar[PlatformCapabilities] = PlatformCapabilities(
        supports_triton=True, graph_capture=True, supports_pynccl=True
    )

    def get_default_attention_backend(self) -> str:
        return "triton" if _has_triton() else "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "cuda" if _has_triton() else "native"

    def get_graph_runner_cls(self) -> type | str:
        return "sgl_aspects.runtime.execution.graph_runner:GraphRunner"

    def supports_fp8(self) -> bool:
        """Arithmetic in float8 came with compute capability 8.9."""
        capability = self.get_device_capability()
        return capability is not None and capability >= (8, 9)

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "inductor"


#: SGLang's name for its own platform of this device.
CudaSRTPlatform = CudaPlatform


def _has_triton() -> bool:
    """torch brings Triton on Linux; elsewhere the plain operators are used."""
    return importlib.util.find_spec("triton") is not None
