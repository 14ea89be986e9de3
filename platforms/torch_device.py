"""Devices that torch serves through a module ``torch.<device_type>``, modelled on ``torch.cuda``.

NVIDIA, AMD, Intel, Ascend, Moore Threads and Gaudi devices share these calls; their classes define the
differences.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import MethodDescriptorType
from typing import TYPE_CHECKING, Any, ClassVar

from sgl_aspects.errors import PlatformError
from sgl_aspects.platforms.device_mixin import DeviceMixin
from sgl_aspects.platforms.events import DeviceEvent
from sgl_aspects.platforms.identity import DeviceCapability

if TYPE_CHECKING:
    import torch


class TorchEvent(DeviceEvent):
    """A timed event of torch: recording it costs the host a launch, querying it does not wait."""

    __slots__ = ("_event", "_recorded")

    def __init__(self, event: Any) -> None:
        self._event = event
        self._recorded = False

    def record(self, stream: Any = None) -> None:
        self._event.record() if stream is None else self._event.record(stream)
        self._recorded = True

    def query(self) -> bool:
        # torch returns True for an event that was never recorded.
        return self._recorded and bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_ms(self, end: DeviceEvent) -> float:
        if not isinstance(end, TorchEvent):
            raise TypeError(f"elapsed_ms takes another TorchEvent, not {type(end).__qualname__}")
        if not (self._recorded and end._recorded):
            which = "end" if self._recorded else "first"
            raise RuntimeError(
                f"The {which} event was never recorded: call record() on both before elapsed_ms()."
            )
        return float(self._event.elapsed_time(end._event))

    # torch's own methods in Python only add frames to those of their base, which is written in C.

    def marker(self) -> Callable[[Any], object]:
        self._recorded = True
        record = getattr(type(self._event).__base__, "record", None)
        return record.__get__(self._event) if isinstance(record, MethodDescriptorType) else self.record

    def timer(self, end: DeviceEvent) -> Callable[[], float]:
        elapsed = getattr(type(self._event).__base__, "elapsed_time", None)
        if isinstance(elapsed, MethodDescriptorType) and isinstance(end, TorchEvent):
            return functools.partial(elapsed, self._event, end._event)
        return super().timer(end)


class TorchDeviceMixin(DeviceMixin):
    """The operations as ``torch.<device_type>`` offers them."""

    #: The embedded engine's own, which only require that the device has the type.
    #: The package that adds the module to torch; None where torch brings it.
    torch_extension: ClassVar[str | None] = None
    #: For ``torch.distributed.init_process_group``.
    distributed_backend: ClassVar[str] = ""
    #: The member of ``torch.profiler.ProfilerActivity`` that sees the device.
    profiler_activity: ClassVar[str | None] = None

    @property
    def torch_module(self) -> Any:
        """``torch.<device_type>``. PlatformError where this torch has none."""
        return torch_module(self.device_type, self.torch_extension)

    def device_count(self) -> int:
        return int(self.torch_module.device_count())

    def get_device(self, local_rank: int) -> torch.device:
        import torch

        count = self.device_count()
        if not 0 <= local_rank < count:
            variable = self.visible_devices_variable
            raise ValueError(
                f"get_device({local_rank}): this process sees {count} {self.device_name} device(s), "
                f"so a local rank is 0 to {count - 1}." + (f" {variable} selects them." if variable else "")
            )
        return torch.device(self.device_type, local_rank)

    def set_device(self, device: torch.device) -> None:
        self.torch_module.set_device(device)

    def get_device_name(self, device_id: int = 0) -> str:
        return str(self.torch_module.get_device_name(device_id))

    def get_device_uuid(self, device_id: int = 0) -> str:
        uuid = getattr(self.torch_module.get_device_properties(device_id), "uuid", None)
        if uuid is None:
            self._not_implemented("get_device_uuid")
        return str(uuid)

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        """Return None: outside CUDA and compatible modules, torch's value is not a pair of numbers."""
        return None

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return int(self.torch_module.get_device_properties(device_id).total_memory)

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """(free, total) bytes by the driver: memory that torch caches counts as used."""
        free, total = self.torch_module.mem_get_info(device_id)
        return int(free), int(total)

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        return float(self.torch_module.max_memory_allocated(device))

    def empty_cache(self) -> None:
        self.torch_module.empty_cache()

    def is_pin_memory_available(self) -> bool:
        return True

    def is_asynchronous(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.torch_module.synchronize()

    def create_event(self) -> DeviceEvent:
        return TorchEvent(self.torch_module.Event(enable_timing=True))

    def current_stream(self) -> Any:
        return self.torch_module.current_stream()

    def create_stream(self) -> Any:
        return self.torch_module.Stream()

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        if stream is None:
            return nullcontext()
        context: AbstractContextManager[Any] = self.torch_module.stream(stream)
        return context

    def is_capturing(self) -> bool:
        # Not every module has graphs, and those that have none never capture.
        asks = getattr(self.torch_module, "is_current_stream_capturing", None)
        return asks is not None and bool(asks())

    def get_torch_distributed_backend_str(self) -> str:
        return self.distributed_backend or super().get_torch_distributed_backend_str()

    def get_profiler_activities(self) -> list[Any]:
        from torch.profiler import ProfilerActivity

        activities = super().get_profiler_activities()
        if self.profiler_activity is not None:
            # Extensions of torch that have no member of their own report as "private use".
            activities.append(getattr(ProfilerActivity, self.profiler_activity, ProfilerActivity.PrivateUse1))
        return activities


def torch_module(name: str, extension: str | None = None) -> Any:
    """``torch.<name>``, once its ``extension`` is imported. PlatformError where there is none."""
    import torch

    if not hasattr(torch, name) and extension is not None:
        try:
            importlib.import_module(extension)
        except ModuleNotFoundError as error:
            raise PlatformError(
                f"torch has no module torch.{name}: install {extension.partition('.')[0]}, which adds it "
                f"({error})"
            ) from error
    if not hasattr(torch, name):
        raise PlatformError(f"torch {torch.__version__} has no module torch.{name}")
    return getattr(torch, name)
