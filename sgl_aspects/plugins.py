"""Plugins: packages that register hooks, found through entry points.

`load_plugins()` is the one entry, called at the start of every process of an engine.
"""

from __future__ import annotations

import logging
import os
import threading
from importlib.metadata import EntryPoint, entry_points

from sgl_aspects import env
from sgl_aspects.engines.sglang import adoption
from sgl_aspects.errors import AspectsError, ConfigError, MissingTargetError, Stop
from sgl_aspects.weaving import HookRegistry, HookSource, current_source

logger = logging.getLogger("sgl_aspects")

PLUGINS_GROUP = "sgl_aspects.plugins"
PLATFORMS_GROUP = "sgl_aspects.platforms"
TRACING = EntryPoint("tracing", "sgl_aspects.tracing.plugin:activate", PLUGINS_GROUP)
"""Our own plugin: it asks its own variables whether it is wanted, and needs no installed metadata."""

ATTACHING = EntryPoint("attach", "sgl_aspects.engines.sglang.attachments:activate", PLUGINS_GROUP)
"""Likewise, for operators and communication."""

_lock = threading.RLock()
_loaded = False


def load_plugins() -> None:
    """Run every allowed plugin once in this process, then apply the hooks that they registered.

    Other threads wait until that is done; a plugin that calls this again goes on at once.

    Environment: ``SGLANG_PLUGINS`` (comma-separated names) allows only these, checked before a plugin's
    module is imported; with ``SGLANG_PLATFORM`` set, plugins of distributions that provide another
    platform are skipped unimported. A plugin that fails is logged with its name and distribution, and
    the rest go on. With SGLang its registry's hooks are adopted (see engines/sglang/adoption.py).

    :raises Stop: a hook that is marked as required cannot be woven, or a setting is wrong.
    """
    global _loaded
    with _lock:
        if _loaded:
            return
        _loaded = True
        try:
            adoption.adopt()
            for plugin in _selected():
                _run(plugin)
            _register_declared_hooks()
            HookRegistry.apply_hooks()
        except AspectsError as error:
            raise Stop(error) from error
        adoption.reach_children()
        _write_report()


def _register_declared_hooks() -> None:
    """The hooks of the configuration file. A fault in it stops the process: whoever wrote it is watching."""
    if env.text("SGL_ASPECTS_CONFIG") is None:
        return
    from sgl_aspects import config

    for declared in config.from_environment().hooks:
        HookRegistry.register(
            str(declared.target),
            declared.load(),
            declared.hook_type,
            source=HookSource(declared.where),
            order=declared.order,
            required=declared.required,
        )


def _write_report() -> None:
    if env.text("SGL_ASPECTS_REPORT") is None:
        return
    from sgl_aspects import process_reports

    process_reports.write_from_environment()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()  # the parent's may be held by a thread that is not here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _selected() -> list[EntryPoint]:
    allowed = env.names("SGLANG_PLUGINS")
    excluded = _distributions_of_other_platforms()
    selected: list[EntryPoint] = [TRACING, ATTACHING]
    for plugin in entry_points(group=PLUGINS_GROUP):
        distribution = plugin.dist.name if plugin.dist else None
        if allowed and plugin.name not in allowed:
            logger.info("plugin %s is not in SGLANG_PLUGINS: skipped", plugin.name)
        elif distribution in excluded:
            logger.info("plugin %s belongs to another platform than SGLANG_PLATFORM: skipped", plugin.name)
        elif not any(plugin.name == other.name and plugin.value == other.value for other in selected):
            selected.append(plugin)
    return selected


def _distributions_of_other_platforms() -> set[str]:
    platform = env.text("SGLANG_PLATFORM")
    if platform is None:
        return set()
    name = platform.partition("=")[0]
    providers = entry_points(group=PLATFORMS_GROUP)
    chosen = {plugin.dist.name for plugin in providers if plugin.dist and plugin.name == name}
    return {plugin.dist.name for plugin in providers if plugin.dist and plugin.name != name} - chosen


def _run(plugin: EntryPoint) -> None:
    distribution = (
        "sgl-aspects" if plugin in (TRACING, ATTACHING) else plugin.dist.name if plugin.dist else None
    )
    source = HookSource(plugin.name, distribution)
    token = current_source.set(source)
    try:
        plugin.load()()
    except (MissingTargetError, Stop):
        raise  # a hook that it marked as required has no target
    except ConfigError as error:
        # Whoever wrote the setting wants its name, not the place that read it.
        logger.error("plugin %s failed; the others go on: %s", source, error)
    except (Exception, SystemExit):
        logger.exception("plugin %s failed; the others go on", source)
    finally:
        current_source.reset(token)
