"""The table of built-in platforms: the name, the class, how the hardware is detected, and the rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BuiltinPlatform:
    """One row. ``detect`` returns None where the hardware is there, else the reason why it is not."""

    name: str
    class_name: str
    #: The highest that is detected is chosen. Plugins come before all of these.
    priority: int
    detect: Callable[[], str | None]


def _detect_cuda() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    if torch.version.hip is not None:
        return "this torch is built for ROCm (torch.version.hip is set)"
    return None


def _detect_cpu() -> str | None:
    return None


BUILTIN_PLATFORMS: tuple[BuiltinPlatform, ...] = (
    BuiltinPlatform("cuda", "sgl_aspects.platforms.cuda:CudaPlatform", 100, _detect_cuda),
    BuiltinPlatform("cpu", "sgl_aspects.platforms.cpu:CpuPlatform", 0, _detect_cpu),
)
