"""Plugins: packages that register hooks, found through entry points.

`load_plugins()` is the only entry, called at the start of every process of an engine.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeAlias

from sgl_aspects import env
from sgl_aspects.errors import AspectsError, ConfigError, MissingTargetError, Stop
from sgl_aspects.weaving import HookRegistry, HookSource, current_source

logger = logging.getLogger("sgl_aspects")

PLUGINS_GROUP = "sgl_aspects.plugins"
PLATFORMS_GROUP = "sgl_aspects.platforms"
#: SGLang's names for the same groups, for plugins and platforms that were written for it.
SGLANG_PLUGINS_GROUP = "sglang.srt.plugins"
SGLANG_PLATFORMS_GROUP = "sglang.srt.platforms"

TRACING = EntryPoint("tracing", "sgl_aspects.tracing.plugin:activate", PLUGINS_GROUP)
"""The tracing plugin of this package: it reads its own variables, and needs no installed metadata."""

Installed: TypeAlias = Callable[[str], Iterable[EntryPoint]]

_ENGINES = Path(__file__).parent / "engines"
_DISTRIBUTION = "sgl-aspects"

_lock = threading.RLock()
_loaded: set[str] = set()
# Functions of the engines' rooms, called once all hooks are in place.
_afterwards: list[Callable[[], None]] = []


def load_plugins(*, compatible: bool = False) -> None:
    """Run every allowed plugin once in this process, then apply the hooks that they registered.

    Other threads wait until that is done; a plugin that calls this again goes on at once.

    Environment: ``SGLANG_PLUGINS`` (comma-separated names) allows only these, checked before a plugin's
    module is imported; with ``SGLANG_PLATFORM`` set, plugins of distributions that provide another
    platform are skipped unimported. A plugin that fails is logged with its name and distribution, and
    the rest go on.

    :param compatible: plugins of SGLang's group run, too. Not for SGLang's processes: it runs them itself.
    :raises Stop: a hook that is marked as required cannot be woven, or a setting is wrong.
    """
    with _lock:
        groups = {PLUGINS_GROUP, *([SGLANG_PLUGINS_GROUP] if compatible else [])} - _loaded
        if not groups:
            return
        is_first = not _loaded
        _loaded.update(groups)
        try:
            for plugin, distribution in _selected(groups):
                _run(plugin, distribution)
            if is_first:
                _take_requests()
                _register_declared_hooks()
            HookRegistry.apply_hooks()
        except AspectsError as error:
            raise Stop(error) from error
        for finish in _afterwards:
            finish()
        if is_first:
            _write_report()


def load_plugins_by_group(
    group: str, excluded_dists: Iterable[str] = ()
) -> dict[str, tuple[Callable[[], Any], str | None]]:
    """Return the plugins of a group that ``SGLANG_PLUGINS`` allows: ``{name: (callable, distribution)}``.

    Those of ``excluded_dists`` are not imported; one that cannot be imported is logged and left out.
    """
    excluded, found = set(excluded_dists), {}
    for plugin, distribution in _allowed(entry_points(group=group), excluded):
        try:
            found[plugin.name] = (plugin.load(), distribution)
        except KeyboardInterrupt:
            raise
        except BaseException:
            logger.exception("plugin %s failed; the others go on", HookSource(plugin.name, distribution))
    return found


def _register_declared_hooks() -> None:
    """Weave the hooks of the configuration file. An error in it stops the process."""
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


def _take_requests() -> None:
    if env.text("SGL_ASPECTS_OP_CONTROL") is None:
        return
    from sgl_aspects.run import requests

    requests.prepare_from_environment()


def _write_report() -> None:
    if env.text("SGL_ASPECTS_REPORT") is None:
        return
    from sgl_aspects.run import process_reports

    process_reports.write_from_environment()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()  # the parent's may be held by a thread that does not exist here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _selected(groups: set[str]) -> Iterator[tuple[EntryPoint, str | None]]:
    """Yield the plugins to run, with their distributions: the built-in one first, and none twice."""
    installed = _installed()
    seen = set()
    if PLUGINS_GROUP in groups:
        _warn_of_unknown_names(installed)
        for plugin in (TRACING, *_plugins_of_engines()):
            seen.add((plugin.name, plugin.value))
            yield plugin, _DISTRIBUTION
    excluded = _excluded_distributions(installed)
    for group in sorted(groups):
        for plugin, distribution in _allowed(installed(group), excluded):
            # The entry point of this package in SGLang's group is this function.
            if (plugin.name, plugin.value) not in seen and distribution != _DISTRIBUTION:
                seen.add((plugin.name, plugin.value))
                yield plugin, distribution


def _installed() -> Installed:
    """Return entry points by group; all installed distributions are searched now, and only once."""
    found = entry_points()
    return lambda group: found.select(group=group)


def _plugins_of_engines() -> Iterator[EntryPoint]:
    """Call the ``activate()`` of each engine's ``plugin`` module, where it has one."""
    for room in sorted(path.parent.name for path in _ENGINES.glob("*/plugin.py")):
        yield EntryPoint(room, f"sgl_aspects.engines.{room}.plugin:activate", PLUGINS_GROUP)


def _allowed(plugins: Iterable[EntryPoint], excluded: set[str]) -> Iterator[tuple[EntryPoint, str | None]]:
    allowed = env.names("SGLANG_PLUGINS")
    for plugin in plugins:
        distribution = plugin.dist.name if plugin.dist else None
        if allowed and plugin.name not in allowed:
            logger.info("plugin %s is not in SGLANG_PLUGINS: skipped", plugin.name)
        elif distribution in excluded:
            logger.info("plugin %s belongs to another platform than SGLANG_PLATFORM: skipped", plugin.name)
        else:
            yield plugin, distribution


def _warn_of_unknown_names(installed: Installed) -> None:
    allowed = env.names("SGLANG_PLUGINS") or ()
    groups = (PLUGINS_GROUP, SGLANG_PLUGINS_GROUP, PLATFORMS_GROUP, SGLANG_PLATFORMS_GROUP)
    known = {plugin.name for group in groups for plugin in installed(group)}
    unknown = [name for name in allowed if name not in known]
    if unknown:
        logger.warning(
            "SGLANG_PLUGINS names %s, and no installed plugin has that name; installed: %s",
            ", ".join(map(repr, unknown)),
            ", ".join(sorted(known)) or "none",
        )


def excluded_distributions() -> set[str]:
    """Return distributions whose plugins are skipped: they provide another platform than
    ``SGLANG_PLATFORM``'s.

    ``name=pkg.mod:Cls`` names a class without an entry point: its package's distribution is kept as well.
    """
    return _excluded_distributions(_installed())


def _excluded_distributions(installed: Installed) -> set[str]:
    platform = env.text("SGLANG_PLATFORM")
    if platform is None:
        return set()
    name, _, class_name = (part.strip() for part in platform.partition("="))
    groups = (PLATFORMS_GROUP, SGLANG_PLATFORMS_GROUP)
    providers = [plugin for group in groups for plugin in installed(group)]
    chosen = {
        plugin.dist.name
        for plugin in providers
        if plugin.dist and (plugin.name == name or _package(plugin.value) == _package(class_name))
    }
    return {plugin.dist.name for plugin in providers if plugin.dist} - chosen


def _package(qualified_name: str) -> str:
    return qualified_name.partition(":")[0].partition(".")[0]


def _note_failure(source: HookSource, error: BaseException) -> None:
    import traceback

    from sgl_aspects.run import process_reports

    process_reports.failed_plugins[str(source)] = traceback.format_exception_only(error)[-1].strip()


def _run(plugin: EntryPoint, distribution: str | None) -> None:
    source = HookSource(plugin.name, distribution)
    token = current_source.set(source)
    try:
        finish = plugin.load()()
    except (MissingTargetError, Stop, KeyboardInterrupt):
        raise  # a required hook has no target, or the user ends the process
    except ConfigError as error:
        # The user needs the setting's name, not a traceback to where it is read.
        logger.error("plugin %s failed; the others go on: %s", source, error)
        _note_failure(source, error)
    except BaseException as error:  # of asyncio, a test runner, or sys.exit: does not end the process
        logger.exception("plugin %s failed; the others go on", source)
        _note_failure(source, error)
    else:
        if distribution == _DISTRIBUTION and callable(finish):
            _afterwards.append(finish)
    finally:
        current_source.reset(token)
