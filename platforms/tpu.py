"""Google TPUs, through ``torch_xla``. Work is collected and compiled: it runs when a result is needed."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from sgl_aspects.platforms.device_mixin import DeviceMixin
from sgl_aspects.platforms.identity import PlatformEnum
from sgl_aspects.platforms.srt_platform import SRTPlatform

if TYPE_CHECKING:
    import torch


def _xla(name: str = "") -> Any:
    return importlib.import_module(f"torch_xla.{name}" if name else "torch_xla")


class TpuDeviceMixin(DeviceMixin):
    """Operations of TPUs. It has no events: a mark in lazily collected work would measure the collecting."""

    _enum: ClassVar[PlatformEnum] = PlatformEnum.TPU
    device_name: ClassVar[str] = "tpu"
    device_type: ClassVar[str] = "xla"
    visible_devices_variable: ClassVar[str | None] = "TPU_VISIBLE_CHIPS"

    def device_count(self) -> int:
        return int(_xla("runtime").addressable_device_count())

    def get_device(self, local_rank: int) -> torch.device:
        count = self.device_count()
        if not 0 <= local_rank < count:
            raise ValueError(
                f"get_device({local_rank}): this process sees {count} tpu device(s), "
                f"so a local rank is 0 to {count - 1}. {self.visible_devices_variable} selects them."
            )
        device: torch.device = _xla().device(local_rank)
        return device

    def set_device(self, device: torch.device) -> None:
        """A TPU process has no current device; tensors name theirs."""
        if device.type != "xla":
            raise ValueError(f"set_device({device}): the TPU platform has devices of type 'xla'")

    def get_device_name(self, device_id: int = 0) -> str:
        return str(_xla("core.xla_model").xla_device_hw(self.get_device(device_id)))

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(self._memory(device_id)["bytes_limit"])

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = self._memory(device_id)
        return int(memory["bytes_limit"]) - int(memory["bytes_used"]), int(memory["bytes_limit"])

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        memory = _xla("core.xla_model").get_memory_info(device or self.get_device(0))
        return float(memory["peak_bytes_used"])

    def _memory(self, device_id: int) -> Any:
        return _xla("core.xla_model").get_memory_info(self.get_device(device_id))

    def empty_cache(self) -> None:
        """Nothing to do: the XLA runtime keeps no cache that can be released."""

    def synchronize(self) -> None:
        _xla().sync(wait=True)

    def current_stream(self) -> Any:
        return None

    def inference_mode(self) -> AbstractContextManager[Any]:
        """no_grad: XLA's in-place updates do not take inference tensors."""
        import torch

        return torch.no_grad()

    def seed_everything(self, seed: int | None = None) -> None:
        super().seed_everything(seed)
        if seed is not None:
            _xla("core.xla_model").set_rng_state(seed)

    def get_torch_distributed_backend_str(self) -> str:
        return "xla"


class TpuPlatform(TpuDeviceMixin, SRTPlatform):
    """The embedded runtime on TPUs."""

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "tpu"
