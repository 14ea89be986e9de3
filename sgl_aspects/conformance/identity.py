"""The platform's identity, and whether everything that it names exists."""

from __future__ import annotations

import torch

from sgl_aspects.conformance.check import Bench, check, if_declared, require
from sgl_aspects.errors import PlatformError
from sgl_aspects.platforms import DeviceCapability, PlatformCapabilities, PlatformEnum, resolve_qualified_name
from sgl_aspects.platforms.misnamed import misnamed_attributes
from sgl_aspects.runtime.attention.registry import attention_backend_class

_QUERIES = ("cuda", "rocm", "cpu", "xpu", "musa", "npu", "tpu", "mps", "hpu", "sail", "out_of_tree")


@check(write="_enum", expects="one family, and the query that goes with it")
def family(bench: Bench) -> str:
    platform = bench.platform
    is_specified = platform._enum is not PlatformEnum.UNSPECIFIED
    require(is_specified, "a member of PlatformEnum; OOT for a vendor's plugin", platform._enum)
    true = [query for query in _QUERIES if getattr(platform, f"is_{query}")()]
    family = "out_of_tree" if platform._enum is PlatformEnum.OOT else platform._enum.value
    require(true == [family], f"is_{family}() alone to be True", ", ".join(true) or "none")
    return f"is_{family}()"


@check(write="device_name", expects="names for people and for torch")
def names(bench: Bench) -> str:
    platform = bench.platform
    for attribute in ("device_name", "device_type"):
        value = getattr(platform, attribute)
        is_name = isinstance(value, str) and value not in ("", "unspecified")
        require(is_name, "a name of its own", repr(value), attribute)
    product = platform.get_device_name(0)
    require(isinstance(product, str) and bool(product), "a text", repr(product), "get_device_name")
    key = platform.get_dispatch_key_name()
    expected = "what can follow forward_ in a method's name"
    require(key.isidentifier(), expected, repr(key), "get_dispatch_key_name")
    return f"{platform.device_name}: {product}"


@check(write="get_device", expects="a torch device of device_type that holds tensors")
def device(bench: Bench) -> str:
    platform = bench.platform
    count = platform.device_count()
    require(isinstance(count, int) and count >= 1, "at least 1", repr(count), "device_count")
    found = platform.get_device(0)
    require(isinstance(found, torch.device), "a torch.device", repr(found))
    require(found.type == platform.device_type, f"a device of type {platform.device_type}", found)
    platform.set_device(found)
    held = torch.ones(3, device=found).device.type
    require(held == platform.device_type, f"tensors on {platform.device_type}", held)
    return f"{count} × {found}"


@check(write="get_device_uuid", expects="an identifier that stays")
def uuid(bench: Bench) -> str:
    first = if_declared(bench.platform.get_device_uuid, "the device has none")
    again = bench.platform.get_device_uuid(0)
    require(bool(first) and first == again, "the same text twice", f"{first}, {again}")
    return first


@check(write="capabilities", expects="frozen data")
def capabilities(bench: Bench) -> str:
    declared = bench.platform.capabilities
    require(isinstance(declared, PlatformCapabilities), "PlatformCapabilities", declared)
    capability = bench.platform.get_device_capability(0)
    is_right = capability is None or isinstance(capability, DeviceCapability)
    expected = "a DeviceCapability, or None for a device that has no such number"
    require(is_right, expected, repr(capability), "get_device_capability")
    names = [name for name, value in vars(declared).items() if value]
    return ", ".join(names) or "none declared"


@check(
    write="the method that is named", expects="every method that looks like an engine's to be called by one"
)
def methods(bench: Bench) -> str:
    for name, right in misnamed_attributes(type(bench.platform)).items():
        require(False, right, f"{name}, which no engine calls", right)
    return "no misspelt names"


@check(write="get_kv_pool_cls", expects="every named class to exist")
def classes(bench: Bench) -> str:
    platform = bench.platform
    factories = {
        "get_kv_pool_cls": lambda: platform.get_kv_pool_cls(kind="mha"),
        "get_paged_allocator_cls": platform.get_paged_allocator_cls,
        "get_communicator_class": platform.get_communicator_class,
    }
    if platform.support_cuda_graph():
        factories["get_graph_runner_cls"] = platform.get_graph_runner_cls
    found = []
    for name, factory in factories.items():
        answer = factory()
        if answer is None:
            continue
        try:
            found.append(resolve_qualified_name(answer).__name__)
        except PlatformError as error:
            require(False, "a class, or the qualified name of one", error, name)
    backend = platform.get_default_attention_backend()
    found.append(attention_backend_class(backend).__name__)
    return ", ".join(found)
