"""Which module of a model launched a kernel: while a profile is taken, calls of modules are ranges in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from sgl_aspects import compat

#: Begins the name of a range. No operator's does.
RANGE = "sgl_aspects.module "


class ModuleRanges:
    """The modules that are called in a profile, each with the name of its ranges.

    It keeps them, so that no two have the same identity.
    """

    def __init__(self) -> None:
        self._ranges: dict[int, str] = {}
        self._modules: dict[str, Any] = {}
        self._numbers = itertools.count()
        self._undo: Callable[[], None] | None = None

    def start(self) -> None:
        """Make a range of each call of a module in this process, in threads that the profiler records."""
        self._undo = compat.name_module_calls(self._range_of)

    def stop(self) -> None:
        """Undo it; no-op if it was not started. In any thread."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def names(self, models: Iterable[Any]) -> Callable[[str, str], str]:
        """Return a function from two ranges, a module's and the outermost around it, to the module's name.

        That is its name in the first of ``models`` that has it, with the model's class in front where there
        are several models; in none of them, its name in the outermost module, with that one's class. "" if
        that has it neither.
        """
        models = [model for model in models if hasattr(model, "named_modules")]
        found: dict[int, str] = {}
        for number, model in enumerate(models):
            label = f"{type(model).__name__}#{number}:" if len(models) > 1 else ""
            for identity, name in _names_in(model, label).items():
                found.setdefault(identity, name)
        below: dict[str, dict[int, str]] = {}

        def name_of(inner: str, outermost: str) -> str:
            module, top = self._modules[inner], self._modules[outermost]
            if id(module) in found:
                return found[id(module)]
            if outermost not in below:
                below[outermost] = _names_in(top, f"{type(top).__name__}.")
            return below[outermost].get(id(module), "")

        return name_of

    def _range_of(self, module: Any) -> str:
        found = self._ranges.get(id(module))
        if found is None:
            found = self._ranges[id(module)] = f"{RANGE}{next(self._numbers)}"
            self._modules[found] = module
        return found


def _names_in(model: Any, label: str) -> dict[int, str]:
    """Return the names of its modules by identity; its own is its class."""
    # torch.compile() wraps a module in another one.
    names = ((id(module), path.replace("_orig_mod.", "")) for path, module in model.named_modules())
    return {identity: label + path for identity, path in names if path} | {id(model): type(model).__name__}
