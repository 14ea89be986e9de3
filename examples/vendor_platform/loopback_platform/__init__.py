"""The loopback accelerator. Importing this package loads nothing: engines call it to find the hardware."""

from __future__ import annotations

import os


def activate() -> str | None:
    """For sgl-aspects: the qualified name of the platform's class, or None where the hardware is absent."""
    if os.environ.get("LOOPBACK_VISIBLE_DEVICES", "0,1").strip() == "":
        return None
    return "loopback_platform.platform:LoopbackPlatform"


def activate_for_sglang() -> str | None:
    """For SGLang, which writes qualified names with a dot; only if selected by name."""
    if os.environ.get("SGLANG_PLATFORM") != "loopback":
        return None
    return "loopback_platform.sglang.LoopbackSGLangPlatform"


def activate_for_multimodal() -> str | None:
    """For SGLang's engine for images and video; only if selected by name."""
    if os.environ.get("SGLANG_DIFFUSION_PLATFORM_OVERRIDE") != "loopback":
        return None
    return "loopback_platform.sglang_multimodal.LoopbackMultimodalPlatform"
