"""A platform class of ours, offered to real SGLang under the method names that its version knows.

    group ``sglang.srt.platforms``: name -> a function that returns the name of a class made here

``bridged(MyPlatform)`` makes a subclass of SGLang's ``SRTPlatform`` whose device operations are those of
``MyPlatform``. A factory (KV pool, allocator, graph runner) goes over only where ``MyPlatform`` wrote its
own: the defaults of this package name classes of the embedded runtime, and SGLang has its own.

SGLang is imported when a bridge is made, never with this module.
"""

from __future__ import annotations

from typing import Any

from sgl_aspects import env
from sgl_aspects.platforms.discovery import resolve_qualified_name
from sgl_aspects.platforms.srt_platform import SRTPlatform

CPU_NAME = "sgl_aspects_cpu"

#: Asked of the device itself, with the same meaning on both sides.
_DEVICE_METHODS = (
    "get_device",
    "set_device",
    "get_device_name",
    "get_device_uuid",
    "reindex_device_id",
    "get_device_total_memory",
    "get_available_memory",
    "empty_cache",
    "synchronize",
    "get_torch_distributed_backend_str",
    "get_group_coordinator_device",
    "inference_mode",
    "apply_server_args_defaults",
    "get_default_attention_backend",
    "get_dispatch_key_name",
    "init_backend",
    "post_load_model",
)
#: Passed on where the platform wrote its own, else SGLang's answer stands: name -> is it a class?
_FACTORIES = {
    "get_paged_allocator_cls": True,
    "get_graph_runner_cls": True,
    "get_piecewise_backend_cls": True,
    "get_compile_backend": False,
    "get_quantization_config": False,
    "get_communicator_class": True,
    "verify_quantization": False,
    "supports_speculative_algorithm": False,
    "get_speculative_worker_cls": True,
    "get_speculative_graph_runner_cls": True,
}
#: SGLang's capability to ours.
_CAPABILITIES = (
    "supports_triton",
    "graph_capture",
    "piecewise_graph",
    "hicache_device_kernels",
    "supports_pynccl",
)
#: What SGLang up to 0.5.22 demands of a platform where newer ones take None for "yours will do".
_IN_TREE = {
    "get_mha_kv_pool_cls": "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
    "get_mla_kv_pool_cls": "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool",
    # Two names of one pool, in this order.
    "get_nsa_kv_pool_cls": "sglang.srt.mem_cache.memory_pool:NSATokenToKVPool",
    "get_dsa_kv_pool_cls": "sglang.srt.mem_cache.memory_pool:DSATokenToKVPool",
    "get_paged_allocator_cls": "sglang.srt.mem_cache.allocator:PagedTokenToKVPoolAllocator",
}


def activate_cpu() -> str | None:
    """SGLang on any CPU, without its CPU kernels. Only where it is asked for by name, never by itself."""
    if env.text("SGLANG_PLATFORM") != CPU_NAME:
        return None
    return "sgl_aspects.engines.sglang.cpu_platform.SGLangCpuPlatform"


def bridged(platform_class: type[SRTPlatform]) -> type:
    """A class for SGLang's group ``sglang.srt.platforms`` that answers as ``platform_class`` does.

    :raises ModuleNotFoundError: SGLang is not installed, or is too old for platforms (before 0.5.12).
    """
    from sglang.srt.platforms import interface
    from sglang.srt.platforms.device_mixin import PlatformEnum

    base = interface.SRTPlatform
    members: dict[str, Any] = {
        "__doc__": f"{platform_class.__qualname__} as SGLang sees it.",
        "_enum": PlatformEnum.OOT,
        "device_name": platform_class.device_name,
        "device_type": platform_class.device_type,
        "__init__": _init(platform_class),
        "get_current_memory_usage": _get_current_memory_usage,
        "is_pin_memory_available": _is_pin_memory_available,
        "seed_everything": _seed_everything,
        "get_cpu_architecture": _get_cpu_architecture,
        "get_device_capability": _get_device_capability,
        "get_torch_profiler_activity": _get_torch_profiler_activity,
        "get_torch_profiler_activity_str": _get_torch_profiler_activity_str,
        **{name: _forward(name, False) for name in _DEVICE_METHODS},
    }
    for name, is_class in _FACTORIES.items():
        if _is_own(platform_class, name):
            members[name] = _forward(name, is_class)
    capabilities = getattr(interface, "PlatformCapabilities", None)
    if capabilities is not None:
        members["capabilities"] = capabilities(**_known_capabilities(platform_class, capabilities))
    members.update(_pools(platform_class, base))
    # Older names of the same answers; on a newer SGLang nobody asks.
    for name in ("support_cuda_graph", "support_piecewise_cuda_graph", "supports_fp8"):
        members[name] = _forward(name, False)
    # What only SGLang knows of, where the platform's author wrote it for SGLang.
    for name in asked_by(base):
        if name not in members and hasattr(platform_class, name) and not hasattr(SRTPlatform, name):
            members[name] = _forward(name, False)
    return type(platform_class.__name__, (base,), members)


def asked_by(interface: type) -> list[str]:
    """What SGLang may ask of a platform: the public methods of its interface, but for who the platform is."""
    names = {name for cls in interface.__mro__[:-1] for name in vars(cls) if not name.startswith("_")}
    asked = [name for name in names if callable(getattr(interface, name, None))]
    return sorted(name for name in asked if not name.startswith("is_") or name == "is_pin_memory_available")


def _init(platform_class: type[SRTPlatform]) -> Any:
    def __init__(self: Any) -> None:  # noqa: N807
        self.platform = platform_class()

    return __init__


def _forward(name: str, is_class: bool) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(self.platform, name)(*args, **kwargs)
        return resolve_qualified_name(answer) if is_class and answer is not None else answer

    forward.__name__ = name
    return forward


def _get_current_memory_usage(self: Any, device: Any = None) -> float:
    """Bytes in use: SGLang takes this from the total to know what is free."""
    free, total = self.platform.get_available_memory()
    return float(total - free)


def _is_pin_memory_available(self: Any, device: Any = None) -> bool:
    return bool(self.platform.is_pin_memory_available())


def _get_device_capability(self: Any, device_id: int = 0) -> Any:
    from sglang.srt.platforms.device_mixin import DeviceCapability

    found = self.platform.get_device_capability(device_id)
    return None if found is None else DeviceCapability(found.major, found.minor)


def _get_cpu_architecture(self: Any) -> Any:
    from sglang.srt.platforms.device_mixin import CpuArchEnum

    return CpuArchEnum[self.platform.get_cpu_architecture().name]


def _seed_everything(self: Any, seed: int | None = None) -> None:
    if seed is not None:
        self.platform.seed_everything(seed)


def _get_torch_profiler_activity(self: Any) -> Any:
    return self.platform.get_profiler_activities()[-1]


def _get_torch_profiler_activity_str(self: Any) -> str:
    return str(self.platform.get_profiler_activities()[-1].name)


def _is_own(platform_class: type, name: str) -> bool:
    """Whether the platform's author wrote the method, or it is this package's default."""
    method = getattr(platform_class, name, None)
    return method is not None and method is not getattr(SRTPlatform, name, None)


def _known_capabilities(platform_class: type[SRTPlatform], capabilities: Any) -> dict[str, bool]:
    known = getattr(capabilities, "__struct_fields__", ()) or capabilities.__annotations__
    ours = platform_class.capabilities
    return {name: getattr(ours, name) for name in _CAPABILITIES if name in known and hasattr(ours, name)}


def _pools(platform_class: type[SRTPlatform], base: type) -> dict[str, Any]:
    """KV pools and allocator, by the names that this SGLang asks for."""
    if hasattr(base, "get_kv_pool_cls"):
        return {"get_kv_pool_cls": _get_kv_pool_cls}
    members: dict[str, Any] = {}
    for name, in_tree in _IN_TREE.items():
        ours = "get_nsa_kv_pool_cls" if name == "get_dsa_kv_pool_cls" else name
        if hasattr(base, name):
            members[name] = _forward(ours, True) if _is_own(platform_class, ours) else _named(in_tree)
    return members


def _get_kv_pool_cls(self: Any, *, kind: str) -> type | None:
    """None lets SGLang take its own pool, which runs on every torch device."""
    names = {"mha": "get_mha_kv_pool_cls", "mla": "get_mla_kv_pool_cls", "dsa": "get_nsa_kv_pool_cls"}
    cls = type(self.platform)
    if _is_own(cls, "get_kv_pool_cls") or _is_own(cls, names.get(kind, "")):
        return resolve_qualified_name(self.platform.get_kv_pool_cls(kind=kind))
    return None


def _named(qualified_name: str) -> Any:
    def factory(self: Any) -> type:
        return resolve_qualified_name(qualified_name)

    return factory
