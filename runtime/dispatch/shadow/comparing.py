"""The distance of a watched call's tensors from a second implementation's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: The largest difference, as a fraction of the largest value, that rounding explains.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass
class LayerComparison:
    """The result of the compared calls of one operator in one layer."""

    layer: str
    op: str
    impl: str
    shadow: str
    #: The layer's place in the model.
    place: int
    compared: int = 0
    #: How many of them differed by more than ``tolerance``.
    differed: int = 0
    #: The largest difference, as a share of the shadow's largest value. Infinite where one is not finite.
    worst: float = 0.0
    tolerance: float = 0.0
    #: Differences other than numbers: shapes, types or devices unlike the shadow's.
    mismatch: str | None = None
    #: The error of the shadow itself.
    error: str | None = None

    def take(self, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
        """Count one call; True if it is the first that differs."""
        self.compared += 1
        mismatch = _mismatch(found, wanted)
        if mismatch is not None:
            self.mismatch, worst = mismatch, float("inf")
        else:
            worst = max(map(difference, found, wanted), default=0.0)
        tolerance = max((TOLERANCES.get(tensor.dtype, 0.0) for tensor in found), default=0.0)
        self.tolerance, self.worst = tolerance, max(self.worst, worst)
        self.differed += worst > tolerance
        return self.differed == 1 and worst > tolerance


def _mismatch(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> str | None:
    one, other = ([_kind(tensor) for tensor in tensors] for tensors in (found, wanted))
    if one == other:
        return None
    return f"it gives {', '.join(one) or 'no tensor'}, the shadow {', '.join(other) or 'no tensor'}"


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference as a fraction of the largest wanted value; for integers the fraction that
    differs.

    Infinite for another shape, and if one is finite and the other is not.
    """
    if found.shape != wanted.shape:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    if not (found.is_floating_point() and wanted.is_floating_point()):
        return float((found != wanted).double().mean())
    one, other = _exact(found), _exact(wanted)
    finite = other.isfinite()
    if not torch.equal(finite, one.isfinite()):
        return float("inf")
    one, other = one[finite], other[finite]
    if one.numel() == 0:
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to float64, on the host if the device lacks it."""
    has_doubles = tensor.device.type in ("cpu", "cuda")
    return (tensor.detach() if has_doubles else tensor.detach().cpu()).double()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in a value, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []
