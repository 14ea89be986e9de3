"""A pytest plugin (``-p``): imports of SGLang's plugins and registry get this package's instead."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import ModuleType
from typing import Any

import sglang.srt.plugins

from sgl_aspects import HookRegistry, HookSource, HookType, env, plugin_hook, plugins
from sgl_aspects.weaving import State, current_source


class Views(type):
    """The lists of SGLang's registry, made from this package's."""

    @property
    def _hooks(cls) -> dict[str, list[Any]]:
        found = defaultdict(list)
        for one in HookRegistry._advices:
            found[str(one.target)].append((one.hook_type, one.hook, one.source))
        return found

    @property
    def _patched(cls) -> set[str]:
        return {str(one.target) for one in HookRegistry._advices if one.state is State.WOVEN}


class Registry(HookRegistry, metaclass=Views):
    """This package's registry, with those lists."""


registry: Any = ModuleType("sglang.srt.plugins.hook_registry")
registry.HookRegistry, registry.HookSource, registry.HookType = Registry, HookSource, HookType
registry.logger = plugins.logger
registry.plugin_hook, registry._current_plugin_source = plugin_hook, current_source


class Plugins(ModuleType):
    """`sgl_aspects.plugins` under SGLang's name, whose functions use the attributes that a test sets here."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_plugins_loaded":
            plugins._loaded.clear()
        super().__setattr__(name, value)


class Settings:
    """The reader of settings: SGLang's from `envs`, which its tests replace."""

    @staticmethod
    def text(name: str) -> str | None:
        """One setting."""
        if name.startswith("SGLANG_"):
            return getattr(api.envs, name).get() or None
        return env.text(name)

    @staticmethod
    def names(name: str) -> tuple[str, ...]:
        """A setting that lists names."""
        return tuple(part for part in (Settings.text(name) or "").split(",") if part)


api: Any = plugins
api.__class__ = Plugins
api.envs, api.env, api._current_plugin_source = None, Settings, current_source
api._get_excluded_dists = plugins.excluded_distributions
# SGLang's tests replace `entry_points` by a function of the group.
api._installed = lambda: lambda group: api.entry_points(group=group)
api.hook_registry, sglang.srt.plugins = registry, api
sys.modules["sglang.srt.plugins"], sys.modules[registry.__name__] = api, registry
