"""A bridge from a platform class to real SGLang, under the method names of its version.

    group ``sglang.srt.platforms``: name -> a function that returns the name of a class made here

``bridged(MyPlatform)`` makes a subclass of SGLang's ``SRTPlatform`` whose device operations are those of
``MyPlatform``. The vendor's classes are handed over: pools, allocator, attention backends and quantization as
SGLang takes them, by the modules beside this one; all others as they are. For classes of the embedded runtime
SGLang uses its own: it captures graphs only on devices whose graphs are those of torch.cuda.

SGLang is imported when a bridge is made, never with this module.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from sgl_aspects import env
from sgl_aspects.engines.sglang import operators
from sgl_aspects.engines.sglang.bridge import attention, kv_cache, quantization
from sgl_aspects.engines.sglang.bridge.multimodal import bridged_multimodal
from sgl_aspects.engines.sglang.bridge.server_args import apply_defaults
from sgl_aspects.errors import PlatformTypeError
from sgl_aspects.platforms.answers import class_named, name_of
from sgl_aspects.platforms.discovery import resolve_qualified_name
from sgl_aspects.platforms.mm_platform import MMPlatform
from sgl_aspects.platforms.srt_platform import SRTPlatform
from sgl_aspects.plugins import load_plugins

CPU_NAME = "sgl_aspects_cpu"

logger = logging.getLogger("sgl_aspects")

#: Device queries, with the same meaning on both sides.
_DEVICE_METHODS = (
    "set_device",
    "get_device_name",
    "get_device_uuid",
    "reindex_device_id",
    "seed_everything",
    "get_device_total_memory",
    "get_available_memory",
    "empty_cache",
    "synchronize",
    "get_torch_distributed_backend_str",
    "get_group_coordinator_device",
    "inference_mode",
    "get_default_attention_backend",
    "get_dispatch_key_name",
    "post_load_model",
)
#: Passed on if the vendor overrides them; otherwise SGLang's result stands.
_FACTORIES = (
    "get_compile_backend",
    "verify_quantization",
    "supports_speculative_algorithm",
    "supports_speculative_draft_attention_backend",
    "get_default_speculative_draft_attention_backend",
    "get_speculative_cache_locs_fn",
    "support_mamba_cache_extra_buffer",
)
#: The same for methods that return a class or its name.
_CLASS_FACTORIES = (
    "get_paged_allocator_cls",
    "get_graph_runner_cls",
    "get_full_graph_backend_cls",
    "get_piecewise_backend_cls",
    "get_communicator_class",
    "get_quantization_config",
    "get_speculative_worker_cls",
    "get_speculative_graph_runner_cls",
)
#: Made of the vendor's class what SGLang takes.
_ADAPTERS: dict[str, Callable[[type, Any], type]] = {
    "get_paged_allocator_cls": kv_cache.allocator_class,
    "get_quantization_config": quantization.config_class,
}
#: The embedded runtime: its graph runners and compilers work with its own scheduler only.
_RUNTIME = "sgl_aspects.runtime."
#: SGLang's runners and compilers of graphs for devices that torch.cuda drives, by version, newest first.
_CUDA_CLASSES = {
    "get_graph_runner_cls": (
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner",  # from 0.5.16
        "sglang.srt.model_executor.cuda_graph_runner:CudaGraphRunner",
    ),
    "get_piecewise_backend_cls": ("sglang.srt.compilation.cuda_piecewise_backend:CUDAPiecewiseBackend",),
}
#: Capabilities that need a class.
_NEEDS = {"graph_capture": "get_graph_runner_cls", "piecewise_graph": "get_piecewise_backend_cls"}
#: SGLang's capability → the platform's.
_CAPABILITIES = (
    "supports_triton",
    "graph_capture",
    "piecewise_graph",
    "hicache_device_kernels",
    "supports_pynccl",
)
#: Required by SGLang up to 0.5.22, for which newer versions accept None and use their own: kinds of pools by
#: SGLang's method, and its own classes.
_POOL_KINDS = {
    "get_mha_kv_pool_cls": "mha",
    "get_mla_kv_pool_cls": "mla",
    # Two names of one pool, in this order.
    "get_nsa_kv_pool_cls": "dsa",
    "get_dsa_kv_pool_cls": "dsa",
}
_IN_TREE = {
    "get_mha_kv_pool_cls": "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool",
    "get_mla_kv_pool_cls": "sglang.srt.mem_cache.memory_pool:MLATokenToKVPool",
    "get_nsa_kv_pool_cls": "sglang.srt.mem_cache.memory_pool:NSATokenToKVPool",
    "get_dsa_kv_pool_cls": "sglang.srt.mem_cache.memory_pool:DSATokenToKVPool",
    "get_paged_allocator_cls": "sglang.srt.mem_cache.allocator:PagedTokenToKVPoolAllocator",
}


def activate_cpu() -> str | None:
    """SGLang on any CPU, without its CPU kernels. Only if selected by name."""
    if env.text("SGLANG_PLATFORM") != CPU_NAME:
        return None
    return "sgl_aspects.engines.sglang.cpu_platform.SGLangCpuPlatform"


def bridged(platform_class: type[SRTPlatform] | type[MMPlatform]) -> type:
    """Return a class for SGLang's group ``sglang.srt.platforms`` that delegates to ``platform_class``.

    For an MMPlatform one for ``sglang.multimodal_gen.platforms``.

    :raises ModuleNotFoundError: SGLang is not installed, or is too old for platforms (before 0.5.12).
    """
    if not (isinstance(platform_class, type) and issubclass(platform_class, (SRTPlatform, MMPlatform))):
        raise PlatformTypeError(
            f"bridged({platform_class!r}): give a subclass of sgl_aspects.platforms.SRTPlatform or MMPlatform"
        )
    if issubclass(platform_class, MMPlatform):
        return bridged_multimodal(platform_class)
    from sglang.srt.platforms import interface
    from sglang.srt.platforms.device_mixin import PlatformEnum

    base = interface.SRTPlatform
    members: dict[str, Any] = {
        "__doc__": f"{platform_class.__qualname__} as SGLang sees it.",
        "_enum": PlatformEnum.OOT,
        "device_name": platform_class.device_name,
        "device_type": platform_class.device_type,
        "platform_class": platform_class,
        "__init__": _init,
        "get_current_memory_usage": _get_current_memory_usage,
        "is_pin_memory_available": _is_pin_memory_available,
        "get_cpu_architecture": _get_cpu_architecture,
        "get_device_capability": _get_device_capability,
        "get_torch_profiler_activity": _get_torch_profiler_activity,
        "get_torch_profiler_activity_str": _get_torch_profiler_activity_str,
        "get_device": _get_device,
        "init_backend": _init_backend,
        "apply_server_args_defaults": _apply_server_args_defaults,
        **{name: _forward(name) for name in _DEVICE_METHODS},
    }
    for name in _FACTORIES:
        if _is_vendors(platform_class, name):
            members[name] = _forward(name)
    for name in _CLASS_FACTORIES:
        if _has_class(platform_class, name):
            members[name] = _forward_class(name)
    capabilities = getattr(interface, "PlatformCapabilities", None)
    if capabilities is not None:
        members["capabilities"] = property(partial(_capabilities, capabilities))
    members.update(_pools(platform_class, base))
    # Older names of the same methods, unused by newer SGLang.
    for name in (
        "support_cuda_graph",
        "support_device_graph",
        "support_piecewise_cuda_graph",
        "supports_fp8",
    ):
        members[name] = _forward(name)
    # Methods of SGLang's interface only, if the platform's author wrote them for SGLang.
    for name in interface_methods(base):
        if name not in members and hasattr(platform_class, name) and not hasattr(SRTPlatform, name):
            members[name] = _forward(name)
    # SGLang's messages name the platform's class.
    members.update(__module__=platform_class.__module__, __qualname__=platform_class.__qualname__)
    return type(platform_class.__name__, (base,), members)


def interface_methods(interface: type) -> list[str]:
    """Return the public methods of SGLang's platform interface, without those of its identity."""
    names = {name for cls in interface.__mro__[:-1] for name in vars(cls) if not name.startswith("_")}
    methods = [name for name in names if callable(getattr(interface, name, None))]
    return sorted(name for name in methods if not name.startswith("is_") or name == "is_pin_memory_available")


def _init(self: Any) -> None:
    self.platform = self.platform_class()
    if env.text("SGLANG_PLATFORM") not in (None, CPU_NAME):
        # SGLang leaves out plugins of packages that have another platform: this package has one for CPUs.
        load_plugins()
    if _is_vendors(self.platform_class, "get_attention_backends"):
        attention.register_when_loaded(self.platform)
    if _is_vendors(self.platform_class, "get_quantization_config"):
        quantization.register_when_loaded(self.platform)


def _apply_server_args_defaults(self: Any, server_args: Any) -> None:
    """And the vendor's attention backend on devices that torch calls "cpu", for which SGLang has chosen its
    own before it asks a platform, unless the user chose one.
    """
    open_fields = apply_defaults(self.platform, server_args)
    if (
        self.platform.device_type == "cpu"
        and _is_vendors(self.platform_class, "get_default_attention_backend")
        and "attention_backend" in open_fields
        and server_args.attention_backend in (None, "intel_amx", "torch_native")
    ):
        server_args.attention_backend = self.platform.get_default_attention_backend()


def _init_backend(self: Any) -> None:
    self.platform.init_backend()
    operators.register_own(self.platform.get_dispatch_key_name())


def _forward(name: str) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.platform, name)(*args, **kwargs)

    forward.__name__ = name
    return forward


def _forward_class(name: str) -> Any:
    """Wrap a vendor's factory; SGLang's own class is used if it names none that SGLang can use."""

    def factory(self: Any, *args: Any, **kwargs: Any) -> type | None:
        cls = type(self.platform)
        if not _is_vendors(cls, name):
            return _cuda_class(cls, name)
        method = getattr(self.platform, name)
        answer = method(*args, **_accepted(method, kwargs))
        if answer is None:
            return None
        found: type = class_named(answer, method)
        if name in _ADAPTERS:
            return None if found.__module__.startswith(_RUNTIME) else _ADAPTERS[name](found, method)
        return _cuda_class(cls, name) if _is_of_runtime(found) else found

    factory.__name__ = name
    return factory


def _is_of_runtime(answer: type | str) -> bool:
    """Return whether a class, or one that a text names, is the embedded runtime's or derived from one.

    Nothing is imported: a text that names a vendor's module is the vendor's.
    """
    if isinstance(answer, str):
        return answer.startswith(_RUNTIME)
    return any(base.__module__.startswith(_RUNTIME) for base in answer.__mro__)


def _accepted(method: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that ``method`` accepts: newer versions of SGLang pass more."""
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return keywords
    return {name: value for name, value in keywords.items() if name in parameters}


def _cuda_class(platform_class: type, name: str) -> type | None:
    """Return SGLang's own class for devices that torch.cuda drives; None on others."""
    if getattr(platform_class, "device_type", "") != "cuda":
        return None
    names = _CUDA_CLASSES.get(name, ())
    found = next((each for each in names if _has_module(each.partition(":")[0])), None)
    return None if found is None else resolve_qualified_name(found)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package
        return False


def _get_device(self: Any, device_id: int | None = 0) -> Any:
    """Map None, SGLang's device before one is chosen, to the name of the device's type."""
    return self.device_type if device_id is None else self.platform.get_device(device_id)


def _get_current_memory_usage(self: Any, device: Any = None) -> float:
    """Return the bytes in use: SGLang subtracts them from the total."""
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


def _get_torch_profiler_activity(self: Any) -> Any:
    return self.platform.get_profiler_activities()[-1]


def _get_torch_profiler_activity_str(self: Any) -> str:
    return str(self.platform.get_profiler_activities()[-1].name)


def _is_vendors(platform_class: type, name: str) -> bool:
    """Return whether the platform's author wrote the method, rather than sgl_aspects."""
    method = getattr(platform_class, name, None)
    return method is not None and not str(method.__module__).startswith("sgl_aspects.")


def _capabilities(capabilities: Any, self: Any) -> Any:
    """Return the capabilities under SGLang's names, without those whose class the platform lacks."""
    found = self.__dict__.get("_known_capabilities")
    if found is None:
        found = self._known_capabilities = capabilities(**_known_capabilities(self.platform, capabilities))
    return found


def _known_capabilities(platform: SRTPlatform, capabilities: Any) -> dict[str, bool]:
    known = getattr(capabilities, "__struct_fields__", ()) or capabilities.__annotations__
    ours = platform.capabilities
    found = {
        name: getattr(ours, name) and (name not in _NEEDS or _has_usable_class(platform, _NEEDS[name]))
        for name in _CAPABILITIES
        if name in known and hasattr(ours, name)
    }
    if "piecewise_graph" in found and not _is_vendors(type(platform), _NEEDS["piecewise_graph"]):
        # What SGLang's own class does, not what the embedded engine replays.
        found["piecewise_graph"] = found["graph_capture"] and platform.device_type == "cuda"
    return found


def _has_usable_class(platform: SRTPlatform, factory: str) -> bool:
    """Decided without an import: SGLang calls it while its modules are partly imported."""
    if platform.device_type == "cuda" and factory in _CUDA_CLASSES:
        return True
    if not _is_vendors(type(platform), factory):
        return False
    method = getattr(platform, factory)
    answer = method()
    if not _is_of_runtime(answer):
        return True
    name = answer if isinstance(answer, str) else f"{answer.__module__}:{answer.__qualname__}"
    logger.warning(
        "SGLang captures no graphs on platform %r: %s names %s, which is made for the embedded engine",
        platform.device_name,
        name_of(method),
        name,
    )
    return False


def _has_class(platform_class: type[SRTPlatform], factory: str) -> bool:
    on_cuda = platform_class.device_type == "cuda" and factory in _CUDA_CLASSES
    return on_cuda or _is_vendors(platform_class, factory)


def _pools(platform_class: type[SRTPlatform], base: type) -> dict[str, Any]:
    """Add KV pools and allocator, under the names of this SGLang version."""
    if hasattr(base, "get_kv_pool_cls"):
        return {"get_kv_pool_cls": _get_kv_pool_cls}
    return {name: _or_in_tree(name) for name in _IN_TREE if hasattr(base, name)}


def _get_kv_pool_cls(self: Any, *, kind: str) -> type | None:
    """Return None, so that SGLang uses its own pool, where the vendor has none."""
    own = {"mha": "get_mha_kv_pool_cls", "mla": "get_mla_kv_pool_cls", "dsa": "get_nsa_kv_pool_cls"}
    platform = self.platform
    if _is_vendors(type(platform), "get_kv_pool_cls"):
        method, answer = platform.get_kv_pool_cls, None
        with suppress(NotImplementedError):
            answer = method(kind=kind)
    elif kind in own and _is_vendors(type(platform), own[kind]):
        method = getattr(platform, own[kind])
        answer = method()
    else:
        return None
    found = None if answer is None else class_named(answer, method)
    if found is None or found.__module__.startswith(_RUNTIME):
        return None
    return kv_cache.pool_class(found, kind, method)


def _or_in_tree(name: str) -> Any:
    """Return SGLang's own class for an older version, which does not accept None."""

    def factory(self: Any) -> type:
        kind = _POOL_KINDS.get(name)
        found = _get_kv_pool_cls(self, kind=kind) if kind else _forward_class(name)(self)
        return found or resolve_qualified_name(_IN_TREE[name])

    factory.__name__ = name
    return factory
