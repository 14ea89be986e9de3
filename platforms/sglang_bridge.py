"""A compatibility name: the bridge to SGLang is ``sgl_aspects.engines.sglang.bridge.platform``."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("sgl_aspects.engines.sglang.bridge.platform"), name)
