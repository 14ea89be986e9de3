"""AMD GPUs. HIP answers through ``torch.cuda``: CUDA's operations under another name."""

from __future__ import annotations

from typing import ClassVar

from sgl_aspects.platforms.cuda import CudaDeviceMixin
from sgl_aspects.platforms.identity import PlatformEnum
from sgl_aspects.platforms.srt_platform import SRTPlatform


class RocmDeviceMixin(CudaDeviceMixin):
    """``device_type`` stays "cuda": torch built for ROCm uses that name."""

    _enum: ClassVar[PlatformEnum] = PlatformEnum.ROCM
    device_name: ClassVar[str] = "rocm"
    visible_devices_variable: ClassVar[str | None] = "HIP_VISIBLE_DEVICES"


class RocmPlatform(RocmDeviceMixin, SRTPlatform):
    """The embedded runtime on AMD GPUs. Graphs, Triton's kernels and NCCL are not declared: none has run."""

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "rocm"

    def supports_fp8(self) -> bool:
        """CDNA 3 and later (9.4, 9.5) and RDNA 4 (12.0) calculate in float8; RDNA 3 (11.0) does not."""
        capability = self.get_device_capability()
        return capability is not None and ((9, 4) <= capability < (10, 0) or capability >= (12, 0))


#: SGLang's name for its own platform of this device.
RocmSRTPlatform = RocmPlatform
