"""AMD GPUs. HIP answers through ``torch.cuda``: CUDA's operations under another name."""

from __future__ import annotations

from typing import ClassVar

from sgl_aspects.platforms.cuda import CudaDeviceMixin, CudaPlatform
from sgl_aspects.platforms.identity import PlatformEnum


class RocmDeviceMixin(CudaDeviceMixin):
    """``device_type`` stays "cuda": that is what torch built for ROCm calls its devices."""

    _enum: ClassVar[PlatformEnum] = PlatformEnum.ROCM
    device_name: ClassVar[str] = "rocm"
    visible_devices_variable: ClassVar[str | None] = "HIP_VISIBLE_DEVICES"


class RocmPlatform(RocmDeviceMixin, CudaPlatform):
    """The embedded runtime on AMD GPUs."""
