"""A no-op around hook attached by SGLang's registry (None where it cannot be had), by wrapt, and by hand."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SGLANG = "sglang==0.5.23"
Hook = Callable[[str, str, int], None]


def _pass_on(original_fn: Any, *args: Any, **kwargs: Any) -> Any:
    return original_fn(*args, **kwargs)


def _owner(module: str, target: str) -> tuple[Any, str]:
    *path, name = target.split(".")
    owner = sys.modules[module]
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def sglang_sources(*names: str) -> Path | None:
    """The folder ``sglang`` with these files of the wheel; None without a package index."""
    cache = Path(tempfile.gettempdir()) / "sgl-aspects-bench"
    if not all((cache / name).exists() for name in names):
        cache.mkdir(exist_ok=True)
        # The wheel for one platform serves: only Python files are taken out of it.
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache), SGLANG]
        command += ["--only-binary=:all:", "--python-version", "3.11", "--platform", "manylinux_2_34_x86_64"]
        if not list(cache.glob("sglang-*.whl")) and subprocess.run(command, check=False).returncode:
            return None
        with zipfile.ZipFile(next(cache.glob("sglang-*.whl"))) as wheel:
            wheel.extractall(cache, names)
    return cache / "sglang"


def load_sglang_registry() -> Any:
    """SGLang's hook registry, its one file loaded alone from the wheel; None without a package index."""
    folder = sglang_sources("sglang/srt/plugins/hook_registry.py")
    if folder is None:
        return None
    file = folder / "srt" / "plugins" / "hook_registry.py"
    spec = importlib.util.spec_from_file_location("sglang_hook_registry", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sglang = load_sglang_registry()


def _sglang_hook(module: str, target: str, depth: int) -> None:
    for _ in range(depth):
        hook = lambda original_fn, *args, **kwargs: original_fn(*args, **kwargs)  # noqa: E731
        sglang.HookRegistry.register(f"{module}.{target}", hook, sglang.HookType.AROUND)
    sglang.HookRegistry.apply_hooks()


sglang_hook: Hook | None = _sglang_hook if sglang is not None else None


def closure_hook(module: str, target: str, depth: int) -> None:
    """Wrap by hand: def wrapper(*args, **kwargs) around the function."""
    owner, name = _owner(module, target)
    for _ in range(depth):
        raw = vars(owner)[name]
        function = getattr(raw, "__func__", raw)

        def wrapper(*args: Any, function: Any = function, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        setattr(owner, name, type(raw)(wrapper) if raw is not function else wrapper)


def wrapt_hook(module: str, target: str, depth: int) -> None:
    """wrapt.wrap_function_wrapper, nested."""
    import wrapt

    for _ in range(depth):
        wrapt.wrap_function_wrapper(
            sys.modules[module], target, lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs)
        )
