"""Fill a model's parameters from a checkpoint, and say exactly what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from sgl_aspects.errors import ModelLoadError

_SHOWN = 5


def fill_weights(
    targets: dict[str, torch.Tensor],
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    may_skip: Callable[[str], bool],
) -> None:
    """Copy each tensor into the target of its name, converting type and device.

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
        if target.shape != tensor.shape:
            raise ModelLoadError(
                f"tensor {name!r} has shape {list(tensor.shape)} in the checkpoint, "
                f"but the config asks for {list(target.shape)}"
            )
        target.copy_(tensor)
    if missing:
        raise ModelLoadError(f"the checkpoint lacks {_listed(list(missing))}")
    if unexpected:
        raise ModelLoadError(
            f"the checkpoint has tensors that the model has no place for: {_listed(unexpected)}"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
