"""A bridge from an MMPlatform to SGLang's image and video engine (``sglang.multimodal_gen``).

    group ``sglang.multimodal_gen.platforms``: name -> a function that returns the name of a class made here

That engine calls many of the methods on the class, so all of them are static.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from sgl_aspects.platforms.mm_platform import MMPlatform

_BASE_COMMUNICATOR = (
    "sglang.multimodal_gen.runtime.distributed.device_communicators."
    "base_device_communicator.DeviceCommunicatorBase"
)
#: Methods with the same meaning on both sides.
_SAME = (
    "init_backend",
    "apply_server_args_defaults",
    "get_dispatch_key_name",
    "is_amp_supported",
    "is_float64_supported",
    "set_device",
    "synchronize",
    "empty_cache",
    "get_device",
    "get_device_name",
    "get_device_uuid",
    "get_device_total_memory",
    "get_torch_distributed_backend_str",
    "inference_mode",
    "seed_everything",
    "optimize_vae",
)
#: The dispatcher keys of torch's devices; all extensions of torch are "private use".
_DISPATCH_KEYS = {name: name.upper() for name in ("cpu", "cuda", "xpu", "mps", "hpu", "xla")}


def bridged_multimodal(platform_class: type[MMPlatform]) -> type:
    """Return a class that delegates to ``platform_class``.

    :raises ModuleNotFoundError: this SGLang has no engine for images and video.
    """
    from sglang.multimodal_gen.runtime.platforms import interface

    ours = cache(platform_class)  # made on SGLang's first call
    members: dict[str, Any] = {
        "__doc__": f"{platform_class.__qualname__} as SGLang's multimodal engine sees it.",
        "_enum": interface.PlatformEnum.OOT,
        "device_name": platform_class.device_name,
        "device_type": platform_class.device_type,
        "dispatch_key": _DISPATCH_KEYS.get(platform_class.device_type, "PrivateUse1"),
        "platform": property(lambda self: ours()),
    }

    def add(name: str, answer: Any) -> None:
        answer.__name__ = name
        members[name] = staticmethod(answer)

    for name in _SAME:
        add(name, lambda *args, _name=name, **kwargs: getattr(ours(), _name)(*args, **kwargs))
    if platform_class.get_compile_backend is not MMPlatform.get_compile_backend:
        add("get_compile_backend", lambda mode=None: ours().get_compile_backend(mode))
    add("get_local_torch_device", lambda: ours().get_device(int(os.environ.get("LOCAL_RANK", "0"))))
    add("device_shares_host_memory", lambda: ours().shares_host_memory())
    add("get_all_to_all_communicator_cls", lambda: _BASE_COMMUNICATOR)  # that of torch.distributed
    add("tensor_on_device", lambda tensor: tensor.device.type == platform_class.device_type)

    def get_attn_backend_cls_str(selected_backend: Any, head_size: int, dtype: Any) -> str:
        selected = None if selected_backend is None else str(selected_backend)
        return ours().get_attn_backend_cls_str(selected, head_size, dtype)

    def get_device_capability(device_id: int = 0) -> Any:
        found = ours().get_device_capability(device_id)
        return None if found is None else interface.DeviceCapability(*found)

    def get_current_memory_usage(device: Any = None) -> float:
        return ours().get_current_memory_usage(device)

    def get_cpu_architecture() -> Any:
        known = interface.CpuArchEnum.__members__
        return known.get(ours().get_cpu_architecture().name, interface.CpuArchEnum.UNSPECIFIED)

    for answer in (
        get_attn_backend_cls_str,
        get_device_capability,
        get_current_memory_usage,
        get_cpu_architecture,
    ):
        add(answer.__name__, answer)
    for name in _of_vendor(platform_class):
        if name not in members:
            add(name, lambda *args, _name=name, **kwargs: getattr(ours(), _name)(*args, **kwargs))
    add("get_available_gpu_memory", lambda *args, **kwargs: _available_gib(ours(), *args, **kwargs))
    return type(platform_class.__name__, (interface.Platform,), members)


def _of_vendor(platform_class: type) -> list[str]:
    """Return the methods that the vendor wrote for SGLang's interface alone, or for classes of its own."""
    return [
        name
        for cls in platform_class.__mro__
        if cls is not object and not cls.__module__.startswith("sgl_aspects.")
        for name in vars(cls)
        if not (name.startswith("_") or hasattr(MMPlatform, name)) and callable(getattr(platform_class, name))
    ]


def _available_gib(
    platform: MMPlatform,
    device_id: int | None = None,
    distributed: bool = False,
    empty_cache: bool = True,
    cpu_group: Any = None,
) -> float:
    """Return the least of all ranks if ``distributed``."""
    if empty_cache:
        platform.empty_cache()
    free = platform.get_available_memory(device_id or 0)[0] / 2**30
    if not distributed:
        return free
    import torch

    least = torch.tensor(free, dtype=torch.float64)
    torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=cpu_group)
    return float(least)
