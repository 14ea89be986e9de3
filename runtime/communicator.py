"""Communicator: what the ranks of one engine tell each other."""

from __future__ import annotations

from typing import Any

import torch

from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import current_platform, resolve_qualified_name


class Communicator:
    """One rank alone: nothing to tell. Tensors come back as they are."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on each of them. ``x`` may be overwritten."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The tensors of all ranks, of one shape, one after the other along ``dim``."""
        return x

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """What rank ``source`` has, in place."""
        return x

    def gather_objects(self, value: Any) -> list[Any]:
        """What each rank gave, by rank; small things that pickle."""
        return [value]

    def close(self) -> None:
        """Leave the group."""

    def share(self, size: int, what: str) -> int:
        """One rank's part of ``size``; ConfigError where it cannot be cut evenly."""
        if size % self.world_size:
            raise ConfigError(
                f"tp_size={self.world_size} does not divide {what} ({size}): choose a tp_size that does"
            )
        return size // self.world_size


class TorchCommunicator(Communicator):
    """``torch.distributed`` with the platform's backend. ``init_method`` is the URL where the ranks meet."""

    def __init__(self, rank: int, world_size: int, init_method: str) -> None:
        import torch.distributed as dist

        self.rank = rank
        self.world_size = world_size
        self._dist = dist
        dist.init_process_group(
            current_platform.get_torch_distributed_backend_str(),
            init_method=init_method,
            rank=rank,
            world_size=world_size,
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(self.world_size)]
        self._dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=dim)

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        self._dist.broadcast(x, src=source)
        return x

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        self._dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        self._dist.destroy_process_group()


def make_communicator(rank: int, world_size: int, init_method: str) -> Communicator:
    """The platform's own class where it has one; nothing to meet for one rank alone."""
    if world_size == 1:
        return Communicator()
    chosen: Any = current_platform.get_communicator_class() or TorchCommunicator
    communicator: Communicator = resolve_qualified_name(chosen)(rank, world_size, init_method)
    return communicator
