"""DeviceMixin: a device's identity, and the operations that an engine needs.

A vendor writes one ``MyDeviceMixin(DeviceMixin)`` and mixes it into each of its platform classes. Nothing is
assumed of a device: a missing operation raises NotImplementedError that names the class, the device and the
method.
"""

from __future__ import annotations

import platform as host
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from sgl_aspects.platforms.identity import CpuArchEnum, DeviceCapability, PlatformEnum
from sgl_aspects.platforms.visible_devices import only_one_visible

if TYPE_CHECKING:
    import torch

    from sgl_aspects.platforms.events import DeviceEvent
    from sgl_aspects.platforms.graphs import DeviceGraph


class DeviceMixin:
    """Identity and operations of one kind of device. All are instance methods."""

    _enum: ClassVar[PlatformEnum] = PlatformEnum.UNSPECIFIED
    #: The name for people: in logs, traces and reports.
    device_name: ClassVar[str] = "unspecified"
    #: The name for torch: ``torch.device(device_type, index)``.
    device_type: ClassVar[str] = "unspecified"
    #: The environment variable of the devices that a process sees; None if there is none.
    visible_devices_variable: ClassVar[str | None] = None
    #: The quantization methods that this device can run.
    supported_quantization: ClassVar[tuple[str, ...]] = ()

    def _not_implemented(self, method: str) -> NoReturn:
        cls = type(self)
        raise NotImplementedError(
            f"{cls.__module__}.{cls.__qualname__} (device {self.device_name!r}) does not implement "
            f"{method}(). Write {method} in its device mixin or platform class."
        )

    # -- identity ------------------------------------------------------------------------------------

    def is_cuda(self) -> bool:
        return self._enum is PlatformEnum.CUDA

    def is_rocm(self) -> bool:
        return self._enum is PlatformEnum.ROCM

    def is_cpu(self) -> bool:
        return self._enum is PlatformEnum.CPU

    def is_xpu(self) -> bool:
        return self._enum is PlatformEnum.XPU

    def is_musa(self) -> bool:
        return self._enum is PlatformEnum.MUSA

    def is_npu(self) -> bool:
        return self._enum is PlatformEnum.NPU

    def is_tpu(self) -> bool:
        return self._enum is PlatformEnum.TPU

    def is_mps(self) -> bool:
        return self._enum is PlatformEnum.MPS

    def is_hpu(self) -> bool:
        return self._enum is PlatformEnum.HPU

    def is_sail(self) -> bool:
        return self._enum is PlatformEnum.SAIL

    def is_cuda_alike(self) -> bool:
        """CUDA, ROCm, MUSA or SAIL: their torch modules answer as ``torch.cuda`` does."""
        alike = (PlatformEnum.CUDA, PlatformEnum.ROCM, PlatformEnum.MUSA, PlatformEnum.SAIL)
        return self._enum in alike

    def is_out_of_tree(self) -> bool:
        """True for a vendor's plugin. For logs only: an engine calls a ``get_…`` method instead."""
        return self._enum is PlatformEnum.OOT

    # -- devices -------------------------------------------------------------------------------------

    def device_count(self) -> int:
        """The number of devices that this process may use."""
        self._not_implemented("device_count")

    def get_device(self, local_rank: int) -> torch.device:
        """The torch device of the worker with this rank on this host."""
        self._not_implemented("get_device")

    def set_device(self, device: torch.device) -> None:
        """Make ``device`` the current one of this thread."""
        self._not_implemented("set_device")

    def get_device_name(self, device_id: int = 0) -> str:
        """The product name, as the driver reports it."""
        self._not_implemented("get_device_name")

    def get_device_uuid(self, device_id: int = 0) -> str:
        """An identifier of this very device, the same after a restart."""
        self._not_implemented("get_device_uuid")

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        """The compute capability; None for devices that have no such number."""
        return None

    def reindex_device_id(self, device_id: int) -> AbstractContextManager[int]:
        """A context for starting a worker that sees one device alone; yields its id there.

        With a visible-devices variable it is narrowed to the device, restored afterwards, and the id is 0.
        Without one the worker sees all devices, and the id stays.
        """
        if self.visible_devices_variable is None:
            return nullcontext(device_id)
        return only_one_visible(self.visible_devices_variable, device_id)

    def get_cpu_architecture(self) -> CpuArchEnum:
        """The architecture of the host's processor."""
        return CpuArchEnum.from_machine(host.machine())

    # -- memory, in bytes ----------------------------------------------------------------------------

    def get_device_total_memory(self, device_id: int = 0) -> int:
        """All memory of the device."""
        self._not_implemented("get_device_total_memory")

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        """(free, total): the memory that can be allocated now, and all of it."""
        self._not_implemented("get_available_memory")

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        """The most that this process has had allocated at one time."""
        self._not_implemented("get_current_memory_usage")

    def empty_cache(self) -> None:
        """Release unused cached memory to the device."""
        self._not_implemented("empty_cache")

    def shares_host_memory(self) -> bool:
        """True if the device has no memory of its own: it uses the host's."""
        return False

    def is_pin_memory_available(self) -> bool:
        """True if page-locked host memory makes copies to the device faster."""
        return False

    # -- running -------------------------------------------------------------------------------------

    def is_asynchronous(self) -> bool:
        """True if work is queued and the host goes on: an engine then schedules the next step meanwhile.

        Needs ``create_event``, whose events are waited for.
        """
        return False

    def synchronize(self) -> None:
        """Wait until the current device has done all queued work."""
        self._not_implemented("synchronize")

    def create_event(self) -> DeviceEvent:
        """A new, unrecorded :class:`~sgl_aspects.platforms.events.DeviceEvent` that can be timed."""
        self._not_implemented("create_event")

    def current_stream(self) -> Any:
        """The current stream; None for devices without streams."""
        self._not_implemented("current_stream")

    def stream_handle(self, stream: Any) -> int:
        """The value of ``stream`` for C code; 0 if no event of this platform has a ``recorder``."""
        return 0

    def create_stream(self) -> Any:
        """A second stream, for work beside the current one; None for devices without concurrent work."""
        return None

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which work goes to ``stream``; None leaves everything as it is."""
        if stream is not None:
            self._not_implemented("use_stream")
        return nullcontext()

    def create_graph(self) -> DeviceGraph:
        """A new, empty :class:`~sgl_aspects.platforms.graphs.DeviceGraph`."""
        self._not_implemented("create_graph")

    def is_capturing(self) -> bool:
        """True while a graph is being captured: nothing may synchronise, and no event may be timed."""
        return False

    def inference_mode(self) -> AbstractContextManager[Any]:
        """A context in which autograd records nothing."""
        import torch

        return torch.inference_mode()

    def seed_everything(self, seed: int | None = None) -> None:
        """Seed Python's, numpy's (where it is loaded) and torch's generators. None does nothing."""
        if seed is None:
            return
        import random
        import sys

        import torch

        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def verify_quantization(self, quant: str) -> None:
        """Raise ValueError if this device cannot run the quantization method ``quant``."""
        if quant in self.supported_quantization:
            return
        declared = ", ".join(self.supported_quantization) or "no quantization method"
        raise ValueError(
            f"{type(self).__qualname__} (device {self.device_name!r}) declares {declared}, not {quant!r}. "
            f"Load an unquantized checkpoint, or add it to supported_quantization."
        )

    # -- several devices -----------------------------------------------------------------------------

    def get_torch_distributed_backend_str(self) -> str:
        """The name for ``torch.distributed.init_process_group(backend=…)``."""
        self._not_implemented("get_torch_distributed_backend_str")

    def get_communicator_class(self) -> type | str | None:
        """The class, or its qualified name, whose collectives are used; None: torch.distributed's own."""
        return None

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        """The device on which the collectives of this rank run."""
        return self.get_device(local_rank)

    def get_profiler_activities(self) -> list[Any]:
        """The ``torch.profiler.ProfilerActivity`` values that see this device's work."""
        from torch.profiler import ProfilerActivity

        return [ProfilerActivity.CPU]
