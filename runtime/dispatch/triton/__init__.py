"""Kernels in Triton: ``<operator>.py`` in this folder holds a function of that name, which is registered.

Where the GPU can (Hopper and later), a kernel starts while the one before it still runs: it fetches weights,
which are constant, and only then waits for its input. Every kernel here waits before it reads or writes
memory that another kernel uses.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from sgl_aspects.runtime.dispatch.registry import OpRegistry
from sgl_aspects.runtime.dispatch.types import ImplKind, OpImpl, needs, on_platform

VENDOR = "cuda"
#: Before the kernels of ``sgl_kernel``.
_PRIORITY = ImplKind.VENDOR.priority + 10


def register(registry: OpRegistry) -> None:
    """Register, without importing Triton: an implementation's module is imported when it is first chosen."""
    for file in sorted(Path(__file__).parent.glob("[!_]*.py")):
        registry.register(
            OpImpl(
                file.stem,
                f"triton.{file.stem}",
                ImplKind.VENDOR,
                f"{__name__}.{file.stem}:{file.stem}",
                vendor=VENDOR,
                priority=_PRIORITY,
                device_types=frozenset({"cuda"}),
                is_available=available,
            )
        )


def available() -> bool | str:
    """Return whether Triton is installed and the platform's dispatch key is "cuda"; or why not."""
    here = on_platform(VENDOR)()
    return needs("triton")() if here is True else here


@cache
def overlapping() -> dict[str, Any]:
    """Launch options of kernels that start early and wait inside."""
    import triton

    if triton.knobs.runtime.interpret:
        return {"OVERLAP": False}
    target = triton.runtime.driver.active.get_current_target()
    early = target.backend == "cuda" and target.arch >= 90
    return {"OVERLAP": True, "launch_pdl": True} if early else {"OVERLAP": False}
