"""The platform for SGLang's engine for images and video. Importing this imports that engine's interface."""

from __future__ import annotations

from loopback_platform.platform import LoopbackMMPlatform
from sgl_aspects.platforms.sglang_bridge import bridged

LoopbackMultimodalPlatform = bridged(LoopbackMMPlatform)
