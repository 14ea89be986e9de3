"""The table of built-in platforms: the name, the class, how the hardware is detected, and the rank."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class BuiltinPlatform:
    """One row. ``detect`` returns None if the hardware is present, else the reason why not."""

    name: str
    class_name: str
    #: The highest that is detected is chosen. Plugins come first.
    priority: int
    detect: Callable[[], str | None]


def _detect_cuda() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    if torch.version.hip is not None:
        return "this torch is built for ROCm (torch.version.hip is set)"
    return None


def _detect_rocm() -> str | None:
    import torch

    if torch.version.hip is None:
        return "this torch is not built for ROCm (torch.version.hip is None)"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    return None


def _detect_mps() -> str | None:
    import torch

    return None if torch.backends.mps.is_available() else "torch.backends.mps.is_available() is False"


def _detect_module(name: str, extension: str | None = None) -> Callable[[], str | None]:
    """Detect by ``torch.<name>.is_available()``; ``extension``: the package that adds the module."""

    def detect() -> str | None:
        import torch

        if not hasattr(torch, name):
            if extension is None:
                return f"this torch has no module torch.{name}"
            if importlib.util.find_spec(extension.partition(".")[0]) is None:
                return f"{extension.partition('.')[0]} is not installed"
            importlib.import_module(extension)
        if not getattr(torch, name).is_available():
            return f"torch.{name}.is_available() is False"
        return None

    return detect


def _detect_tpu() -> str | None:
    if importlib.util.find_spec("torch_xla") is None:
        return "torch_xla is not installed"
    device_type = importlib.import_module("torch_xla.runtime").device_type()
    return None if device_type == "TPU" else f"torch_xla found a device of type {device_type}"


def _detect_cpu() -> str | None:
    return None


def _row(name: str, class_name: str, priority: int, detect: Callable[[], str | None]) -> BuiltinPlatform:
    return BuiltinPlatform(name, f"sgl_aspects.platforms.{name}:{class_name}", priority, detect)


BUILTIN_PLATFORMS: tuple[BuiltinPlatform, ...] = (
    _row("cuda", "CudaPlatform", 100, _detect_cuda),
    _row("rocm", "RocmPlatform", 90, _detect_rocm),
    _row("npu", "NpuPlatform", 80, _detect_module("npu", "torch_npu")),
    _row("musa", "MusaPlatform", 70, _detect_module("musa", "torch_musa")),
    _row("hpu", "HpuPlatform", 60, _detect_module("hpu", "habana_frameworks.torch.core")),
    _row("tpu", "TpuPlatform", 50, _detect_tpu),
    _row("xpu", "XpuPlatform", 40, _detect_module("xpu")),
    _row("mps", "MpsPlatform", 30, _detect_mps),
    _row("cpu", "CpuPlatform", 0, _detect_cpu),
)
