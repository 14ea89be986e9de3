"""The device of an engine as a platform: traces take its events from there."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_aspects.platforms.device_mixin import DeviceMixin


@functools.cache  # called with each forward pass
def platform_of(device: str) -> DeviceMixin | None:
    """Return the platform of a torch device ("cuda", "npu:0"): a built-in one, else one over
    ``torch.<type>``; it imports torch.

    None if that has no events.
    """
    from sgl_aspects.platforms.builtins import BUILTIN_PLATFORMS
    from sgl_aspects.platforms.discovery import resolve_qualified_name

    device_type = device.partition(":")[0]
    for row in BUILTIN_PLATFORMS:
        built_in: Any = resolve_qualified_name(row.class_name)
        if built_in.device_type == device_type and row.detect() is None:
            platform: DeviceMixin = built_in()
            return platform
    return _torch_device(device_type)


def _torch_device(device_type: str) -> DeviceMixin | None:
    """A device of a third-party extension of torch."""
    import torch

    from sgl_aspects.platforms.identity import PlatformEnum
    from sgl_aspects.platforms.torch_device import TorchDeviceMixin

    if not hasattr(getattr(torch, device_type, None), "Event"):
        return None
    members: dict[str, Any] = {
        "_enum": PlatformEnum.OOT,
        "device_name": device_type,
        "device_type": device_type,
    }
    platform: DeviceMixin = type("TorchDevice", (TorchDeviceMixin,), members)()
    return platform
