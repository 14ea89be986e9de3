"""Runs the checks, in the order of GROUPS, and what they do in processes of their own."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import pkgutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from sgl_aspects.conformance.check import CHECKS, Bench, Check, Result, run_check
from sgl_aspects.errors import ConfigError
from sgl_aspects.isolated import safe_path
from sgl_aspects.platforms import current_platform_choice
from sgl_aspects.plugins import load_plugins

#: Prerequisites of later ones come first.
GROUPS = (
    "identity",
    "operations",
    "memory",
    "events",
    "operators",
    "kv_pools",
    "attention",
    "graphs",
    "capabilities",
    "distributed",
    "generation",
)

EMBEDDED = "embedded"
#: By name, since the engines import the kit.
_ROOMS = "sgl_aspects.engines"
#: The most seconds of a check's processes.
_SECONDS = 180.0


def selected_checks(only: Sequence[str] = (), *, engine: str = EMBEDDED) -> list[Check]:
    """Return all checks of an engine, or those in ``only``, by group or by name.

    Another engine's are in the module ``conformance`` of its room. ConfigError for an unknown check, and for
    an engine that has none.
    """
    checks = _embedded_checks() if engine == EMBEDDED else _checks_of(engine)
    groups = list(dict.fromkeys(check.group for check in checks))
    known = {*groups, *(check.name for check in checks)}
    for name in only:
        if name not in known:
            raise ConfigError(
                f"no check is called {name!r}. Groups: {', '.join(groups)}. Checks: "
                f"{', '.join(check.name for check in checks)}."
            )
    return [check for check in checks if not only or check.group in only or check.name in only]


def _embedded_checks() -> list[Check]:
    for group in GROUPS:
        importlib.import_module(f"sgl_aspects.conformance.{group}")
    mine = [check for check in CHECKS if check.group in GROUPS]
    return sorted(mine, key=lambda check: GROUPS.index(check.group))  # within a group as written


def _checks_of(engine: str) -> list[Check]:
    folders = importlib.import_module(_ROOMS).__path__
    rooms = sorted(room.name for room in pkgutil.iter_modules(folders) if room.ispkg)
    able = [room for room in rooms if importlib.util.find_spec(f"{_ROOMS}.{room}.conformance")]
    if engine not in able:
        raise ConfigError(f"engine {engine!r} has no checks: choose one of {', '.join([EMBEDDED, *able])}")
    module = importlib.import_module(f"{_ROOMS}.{engine}.conformance")
    checks: list[Check] = module.CHECKS
    return checks


def run_checks(checks: Iterable[Check], *, reference: str = "float64") -> Iterator[Result]:
    """Run the checks on the current platform, yielding each result at once.

    If the device cannot even be set up, that is the only result. Checks that start processes expect
    SGLANG_PLATFORM to choose the same platform there.
    """
    platform = current_platform_choice().platform
    with tempfile.TemporaryDirectory(prefix="sgl-aspects-conformance-") as folder:
        made: list[Bench] = []

        def register(_: Bench | None) -> str:
            platform.init_backend()
            return "registered"

        def set_up(_: Bench | None) -> str:
            device = platform.get_device(0)
            platform.set_device(device)
            made.append(Bench(platform, device, Path(folder), reference))
            return str(device)

        for first in (
            Check("setup.backend", "init_backend", "a backend that is initialized", register),
            Check("setup.device", "get_device", "a device that can be used", set_up),
        ):
            result = run_check(first, None)
            if result.status == "failed":
                yield result
                return
        for check in checks:
            yield run_check(check, made[0])


def call_in_processes(function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Run ``function(*arguments[i])`` in spawned process ``i``; answers in order. An error of one is raised.

    Such a process runs the platform that SGLANG_PLATFORM chooses. RuntimeError: one died.
    """
    others = multiprocessing.active_children()
    pool = ProcessPoolExecutor(len(arguments), multiprocessing.get_context("spawn"), load_plugins)
    try:
        with safe_path():  # it starts a process for each
            calls = [pool.submit(function, *words) for words in arguments]
        return [call.result(_SECONDS) for call in calls]
    except BrokenProcessPool:
        raise RuntimeError("a process of the check died; its output is above") from None
    finally:
        pool.shutdown(wait=False)
        for process in multiprocessing.active_children():
            if process not in others:  # where one failed, the others may wait for it endlessly
                process.kill()
