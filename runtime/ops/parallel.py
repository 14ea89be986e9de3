"""Linears that are cut between ranks: by columns into parts of the output, by rows into parts of the sum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sgl_aspects.runtime.communicator import Communicator
from sgl_aspects.runtime.loader.weights import Target
from sgl_aspects.runtime.ops.dense import Linear


class MergedLinear(Linear):
    """Several linears of the same input as one product: ``parts`` names their output sizes, in order.

    Each rank has its share of each part. ``copies``: for a part with fewer pieces than ranks, how many ranks
    have the same piece.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        dtype: torch.dtype,
        tp: Communicator,
        *,
        bias: bool = False,
        copies: Mapping[str, int] | None = None,
    ) -> None:
        self.counts = {name: tp.world_size // (copies or {}).get(name, 1) for name in parts}
        self.parts = {name: size // self.counts[name] for name, size in parts.items()}
        super().__init__(in_features, sum(self.parts.values()), dtype, bias=bias)
        self._tp = tp

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """Yield the targets under the names of the parts, which are siblings of this operator."""
        beside = prefix.rstrip(".").rpartition(".")[0] + "."
        start = 0
        for name, size in self.parts.items():
            count = self.counts[name]
            piece = self._tp.rank * count // self._tp.world_size
            for kind in ("weight", "bias"):
                parameter = getattr(self, kind)
                if parameter is not None:
                    rows = parameter.data[start : start + size]
                    yield f"{beside}{name}.{kind}", Target(rows, 0, piece, count)
            start += size


class ColumnParallelLinear(Linear):
    """A linear of which each rank computes its share of the output."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, tp: Communicator) -> None:
        super().__init__(in_features, out_features // tp.world_size, dtype)
        self._tp = tp

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        yield f"{prefix}weight", Target(self.weight.data, 0, self._tp.rank, self._tp.world_size)


class RowParallelLinear(Linear):
    """A linear of which each rank has its share of the input; the output is the sum, on every rank."""

    def __init__(
        self, in_features: int, out_features: int, dtype: torch.dtype, tp: Communicator, *, bias: bool = False
    ) -> None:
        super().__init__(in_features // tp.world_size, out_features, dtype, bias=bias)
        self._tp = tp

    def forward(self, x: Tensor) -> Tensor:
        return self._tp.all_reduce(super().forward(x))

    def prepare_weights(self) -> None:
        if self.bias is not None and self._tp.rank > 0:
            self.bias.data.zero_()  # it is added once
        super().prepare_weights()

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        yield f"{prefix}weight", Target(self.weight.data, 1, self._tp.rank, self._tp.world_size)
        if self.bias is not None:
            yield f"{prefix}bias", Target(self.bias.data)
