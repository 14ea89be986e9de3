"""A pytest plugin (``-p``): who imports SGLang's hook registry gets our names for the same."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from sgl_aspects import HookRegistry, HookSource, HookType, plugin_hook
from sgl_aspects.weaving import current_source

faces: Any = ModuleType("sglang.srt.plugins.hook_registry")
faces.HookRegistry, faces.HookSource, faces.HookType = HookRegistry, HookSource, HookType
faces.plugin_hook, faces._current_plugin_source = plugin_hook, current_source
sys.modules[faces.__name__] = faces
