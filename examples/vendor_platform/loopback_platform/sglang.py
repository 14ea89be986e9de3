"""The platform for real SGLang, under the method names of its version. Importing this imports SGLang."""

from __future__ import annotations

from loopback_platform.platform import LoopbackPlatform
from sgl_aspects.platforms.sglang_bridge import bridged

LoopbackSGLangPlatform = bridged(LoopbackPlatform)
