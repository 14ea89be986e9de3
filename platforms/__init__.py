"""Devices: what an engine needs from the hardware it runs on.

An engine never branches on a device's name; it queries :data:`current_platform`.

    identity.py      names and plain data: PlatformEnum, CpuArchEnum, DeviceCapability, PlatformCapabilities
    device_mixin.py  DeviceMixin: identity queries and device operations
    srt_platform.py  SRTPlatform: what a text engine needs beyond that
    mm_platform.py   MMPlatform: the same for a multimodal engine
    events.py        moments on a device's timeline, for device times in traces
    graphs.py        work that a device records once and replays
    torch_device.py  what all devices share that torch serves through a module like torch.cuda
    cpu.py, cuda.py, rocm.py, xpu.py, npu.py, musa.py, mps.py, hpu.py, tpu.py
                     the built-in devices; builtins.py is their table
    sglang_bridge.py the name under which users import the bridge to SGLang
    discovery.py     which platform runs: plugins, SGLANG_PLATFORM, detection; bounded.py: with a time limit
    misnamed.py      attributes of a vendor's class that no engine reads
    answers.py       calls of a platform's methods, whose errors name class and method
    current.py       current_platform, chosen at its first use

Importing this package detects nothing and does not load torch.
"""

from sgl_aspects.platforms.current import (
    current_platform,
    current_platform_choice,
    is_cpu,
    is_cuda,
    is_cuda_alike,
    is_hpu,
    is_mps,
    is_musa,
    is_npu,
    is_out_of_tree,
    is_rocm,
    is_sail,
    is_tpu,
    is_xpu,
    set_current_platform,
)
from sgl_aspects.platforms.device_mixin import DeviceMixin
from sgl_aspects.platforms.discovery import Candidate, PlatformChoice, choose_platform, resolve_qualified_name
from sgl_aspects.platforms.events import ClockEvent, DeviceEvent
from sgl_aspects.platforms.graphs import DeviceGraph
from sgl_aspects.platforms.identity import CpuArchEnum, DeviceCapability, PlatformCapabilities, PlatformEnum
from sgl_aspects.platforms.mm_platform import MMPlatform
from sgl_aspects.platforms.srt_platform import SRTPlatform

__all__ = [
    "Candidate",
    "ClockEvent",
    "CpuArchEnum",
    "DeviceCapability",
    "DeviceEvent",
    "DeviceGraph",
    "DeviceMixin",
    "MMPlatform",
    "PlatformCapabilities",
    "PlatformChoice",
    "PlatformEnum",
    "SRTPlatform",
    "choose_platform",
    "current_platform",
    "current_platform_choice",
    "is_cpu",
    "is_cuda",
    "is_cuda_alike",
    "is_hpu",
    "is_mps",
    "is_musa",
    "is_npu",
    "is_out_of_tree",
    "is_rocm",
    "is_sail",
    "is_tpu",
    "is_xpu",
    "resolve_qualified_name",
    "set_current_platform",
]
