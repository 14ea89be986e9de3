"""Fills a model's parameters from a checkpoint, with an error for each mismatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from sgl_aspects.errors import ModelLoadError

_SHOWN = 5


@dataclass(frozen=True)
class Target:
    """The destination of a checkpoint's tensor: the whole of it, or this rank's piece of ``count`` along
    ``dim``.
    """

    tensor: torch.Tensor
    dim: int = 0
    index: int = 0
    count: int = 1

    @property
    def shape(self) -> list[int]:
        """The required shape of the checkpoint's tensor."""
        shape = list(self.tensor.shape)
        if self.count > 1:
            shape[self.dim] *= self.count
        return shape

    def fill(self, whole: torch.Tensor) -> None:
        """Converts type and device."""
        if self.count > 1:
            size = self.tensor.shape[self.dim]
            whole = whole.narrow(self.dim, self.index * size, size)
        self.tensor.copy_(whole)


def weight_targets(model: nn.Module) -> dict[str, Target]:
    """Return every parameter by the name that checkpoints use.

    A module whose parameters are merged or cut has a ``weight_targets(prefix)``; ``prefix`` is its own path
    with a dot. Others take each tensor whole.
    """
    targets: dict[str, Target] = {}
    for path, module in model.named_modules():
        own = getattr(module, "weight_targets", None)
        if own is not None:
            targets.update(own(f"{path}."))
            continue
        for name, parameter in module.named_parameters(path, recurse=False):
            targets[name] = Target(parameter.data)
    return targets


def fill_weights(
    targets: dict[str, Target],
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    may_skip: Callable[[str], bool],
) -> None:
    """Copy each tensor into the target of its name.

    A tensor of another shape, one that has no target (unless ``may_skip(name)``), one that comes twice and a
    target that nothing filled are ModelLoadErrors that name the tensor.
    """
    missing = dict(targets)
    unexpected: list[str] = []
    for name, tensor in weights:
        target = missing.pop(name, None)
        if target is None:
            if name in targets:
                raise ModelLoadError(f"tensor {name!r} is in the checkpoint twice")
            if not may_skip(name):
                unexpected.append(name)
            continue
        if target.shape != list(tensor.shape):
            raise ModelLoadError(
                f"tensor {name!r} has shape {list(tensor.shape)} in the checkpoint, "
                f"but the config requires {target.shape}"
            )
        target.fill(tensor)
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {_listed(list(missing))}")
    if unexpected:
        raise ModelLoadError(
            f"the checkpoint has tensors that the model does not have: {_listed(unexpected)}"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
