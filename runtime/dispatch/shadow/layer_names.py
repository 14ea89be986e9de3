"""Names of the layers that are running, while operators are watched.

Hooks on all modules keep the innermost one that runs. A module that is called while none is running is a
model: its parts get their names then, such as "model.layers.7.mlp.activation". Compiled code runs no hooks.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class LayerNames:
    """After ``start()``, ``current()`` returns (place in the model's order, path)."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, tuple[int, str]] = weakref.WeakKeyDictionary()
        self._running = threading.local()
        self._handles: list[Any] = []

    def start(self) -> None:
        if not self._handles:
            self._handles = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._exit, always_call=True),
            ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def current(self) -> tuple[int, str]:
        """Return the running layer; (0, "") outside of every module."""
        stack = self._stack()
        return self._names.get(stack[-1], (0, type(stack[-1]).__name__)) if stack else (0, "")

    def _learn(self, model: nn.Module) -> None:
        for place, (path, part) in enumerate(model.named_modules()):
            path = path.removeprefix("_orig_mod").lstrip(".")  # wrappers by torch.compile
            self._names.setdefault(part, (place, path or type(model).__name__))

    def _stack(self) -> list[nn.Module]:
        if not hasattr(self._running, "stack"):
            self._running.stack = []
        stack: list[nn.Module] = self._running.stack
        return stack

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._stack()
        if not stack and module not in self._names:
            self._learn(module)
        stack.append(module)

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = self._stack()
        if module in stack:  # the watch may have begun in the middle of one
            while stack.pop() is not module:
                pass
