"""Names of the layers that are running, while operators are watched.

Hooks on all modules keep the innermost one that runs. A module that is called while none is running is a
model: its parts get their names then, such as "model.layers.7.mlp.activation".

In compiled code no hook runs. Compilers trace the hooks, which then give the module whose code is being
compiled, and each module has a number, which the compiled code passes on when it runs.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_NUMBER = "_sgl_aspects_number"
_numbers = itertools.count(1)
_numbered: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def number_tensor(number: int) -> torch.Tensor:
    """Return the number as a tensor: an input of compiled code, so that layers of one kind share code."""
    with torch.inference_mode(False):  # the operator that gets it declares that it writes to it
        return torch.tensor(number, device="cpu")


def _give_number(module: nn.Module) -> None:
    if _NUMBER not in module.__dict__:
        number = next(_numbers)
        _numbered[number] = module
        module.__dict__[_NUMBER] = number_tensor(number)


def _modules() -> list[nn.Module]:
    return [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]


class LayerNames:
    """After ``start()``, ``current()`` returns (place in the model's order, path)."""

    def __init__(self) -> None:
        self._names: weakref.WeakKeyDictionary[nn.Module, tuple[int, str]] = weakref.WeakKeyDictionary()
        self._running = threading.local()
        #: The modules whose code is being compiled, the innermost last.
        self._compiling: list[nn.Module] = []
        self._handles: list[Any] = []

    def start(self) -> None:
        if not self._handles:
            for module in _modules():
                _give_number(module)
            self._handles = [
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._exit, always_call=True),
            ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for number, module in list(_numbered.items()):
            del module.__dict__[_NUMBER], _numbered[number]

    def current(self) -> tuple[int, str]:
        """Return the running layer; (0, "") outside of every module."""
        stack = self._stack()
        return self._names.get(stack[-1], (0, type(stack[-1]).__name__)) if stack else (0, "")

    def compiling(self) -> torch.Tensor | None:
        """Return the number of the module whose code is being compiled.

        None for a model that was made after the start and is compiled as a whole before its first call.
        """
        return self._compiling[-1].__dict__.get(_NUMBER) if self._compiling else None

    def name_of(self, number: int) -> tuple[int, str]:
        """Return the module with this number; (0, "") if there is none."""
        module = _numbered.get(number)
        if module is None:
            return (0, "")
        if module not in self._names:
            self._learn_all()
        return self._names.setdefault(module, (0, type(module).__name__))

    def _learn_all(self) -> None:
        """Every model of the process: a module that is part of no other."""
        modules = _modules()
        parts = {id(part) for module in modules for part in module.children()}
        for module in modules:
            if id(module) not in parts:
                self._learn(module)

    def _learn(self, model: nn.Module) -> None:
        for place, (path, part) in enumerate(model.named_modules()):
            path = path.removeprefix("_orig_mod").lstrip(".")  # wrappers by torch.compile
            self._names.setdefault(part, (place, path or type(model).__name__))
            _give_number(part)

    def _stack(self) -> list[nn.Module]:
        if not hasattr(self._running, "stack"):
            self._running.stack = []
        stack: list[nn.Module] = self._running.stack
        return stack

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            self._compiling.append(module)
            return
        stack = self._stack()
        if not stack and module not in self._names:
            self._learn(module)
        stack.append(module)

    def _exit(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            self._compiling.pop()
            return
        stack = self._stack()
        if module in stack:  # the watch may have begun in the middle of one
            while stack.pop() is not module:
                pass
