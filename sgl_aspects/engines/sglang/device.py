"""The platform of the device that real SGLang runs on: traces take its events from there."""

from __future__ import annotations

import sys

from sgl_aspects.engines import device as any_device
from sgl_aspects.platforms.device_mixin import DeviceMixin


def platform_of(device: str) -> DeviceMixin | None:
    """Return the bridged platform that SGLang runs on, else that of the torch device."""
    of_sglang = getattr(sys.modules.get("sglang.srt.platforms"), "current_platform", None)
    bridged = getattr(of_sglang, "platform", None)
    return bridged if isinstance(bridged, DeviceMixin) else any_device.platform_of(device)
