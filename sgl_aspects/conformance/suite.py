"""Runs the checks, in the order of this list: what later ones stand on comes first."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from sgl_aspects.conformance.check import CHECKS, Bench, Check, Result, run_check
from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import current_platform_choice

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
    "determinism",
    "distributed",
    "generation",
)


def selected_checks(only: Sequence[str] = ()) -> list[Check]:
    """All checks, or those that ``only`` names, by group or by name. ConfigError for an unknown one."""
    for group in GROUPS:
        importlib.import_module(f"sgl_aspects.conformance.{group}")
    known = {*GROUPS, *(check.name for check in CHECKS)}
    for name in only:
        if name not in known:
            raise ConfigError(
                f"no check is called {name!r}. Groups: {', '.join(GROUPS)}. Checks: "
                f"{', '.join(check.name for check in CHECKS)}."
            )
    ordered = sorted(CHECKS, key=lambda check: GROUPS.index(check.group))  # within a group as written
    return [check for check in ordered if not only or check.group in only or check.name in only]


def run_checks(checks: Iterable[Check], *, reference: str = "float64") -> Iterator[Result]:
    """One result for each check, as it is there, on the current platform.

    Where the device cannot even be set up, that is the only result. Checks that start processes expect
    SGLANG_PLATFORM to choose the same platform there.
    """
    platform = current_platform_choice().platform
    with tempfile.TemporaryDirectory(prefix="sgl-aspects-conformance-") as folder:
        made: list[Bench] = []

        def set_up(_: Bench | None) -> str:
            platform.init_backend()
            device = platform.get_device(0)
            platform.set_device(device)
            made.append(Bench(platform, device, Path(folder), reference))
            return str(device)

        result = run_check(Check("setup.device", "get_device", "a device that can be used", set_up), None)
        if not made:
            yield result
            return
        for check in checks:
            yield run_check(check, made[0])
