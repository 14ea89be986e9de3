"""NVIDIA GPUs, through ``torch.cuda``."""

from __future__ import annotations

from typing import ClassVar

from sgl_aspects.platforms.graphs import DeviceGraph, TorchGraph
from sgl_aspects.platforms.identity import DeviceCapability, PlatformCapabilities, PlatformEnum
from sgl_aspects.platforms.srt_platform import SRTPlatform
from sgl_aspects.platforms.torch_device import TorchDeviceMixin


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

    def create_graph(self) -> DeviceGraph:
        module = self.torch_module
        return TorchGraph(module.CUDAGraph(), module.graph)


class CudaPlatform(CudaDeviceMixin, SRTPlatform):
    """The embedded runtime on NVIDIA GPUs. It has no graph runner yet, so graph capture is not declared."""

    capabilities: ClassVar[PlatformCapabilities] = PlatformCapabilities(
        supports_triton=True, supports_pynccl=True
    )

    def get_default_attention_backend(self) -> str:
        return "torch_native"
