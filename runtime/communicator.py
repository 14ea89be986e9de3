"""Communicator: collectives between the ranks of one engine."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sgl_aspects import env
from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import current_platform
from sgl_aspects.platforms.answers import class_of

#: The methods that the engine calls on a platform's class.
_COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "gather_objects", "close")


class Communicator:
    """The communicator of a single rank: tensors are returned unchanged."""

    rank = 0
    world_size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, on each of them. ``x`` may be overwritten."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the tensors of all ranks, of one shape, along ``dim``."""
        return x

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Overwrite ``x`` with rank ``source``'s."""
        return x

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return this rank's part, along ``dim``, of the sum over all ranks."""
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send ``x`` to the rank ``to``, which receives it."""
        raise ConfigError(f"send to rank {to}: this rank is alone")

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Receive the tensor of this shape and type that rank ``source`` sends."""
        raise ConfigError(f"recv from rank {source}: this rank is alone")

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the value of each rank, by rank; small objects that pickle."""
        return [value]

    # -- several tensors by name, with other values between them: values pickle, tensors go as they are ----

    def broadcast_tensor_dict(self, values: dict[str, Any] | None, source: int = 0) -> dict[str, Any]:
        """Return rank ``source``'s values on each rank; the others pass None."""
        if self.world_size == 1:
            return dict(values or {})
        mine = values if self.rank == source else None
        described = self.gather_objects(None if mine is None else _described(mine))[source]
        if described is None:
            raise ConfigError(f"broadcast_tensor_dict: rank {source} gave no values")
        return {
            name: self.broadcast(self._held(value), source) if isinstance(value, torch.Tensor) else value
            for name, value in (mine or described).items()
        }

    def send_tensor_dict(self, values: dict[str, Any], to: int) -> None:
        """Send values by name to the rank ``to``, which calls :meth:`recv_tensor_dict`."""
        described = pickle.dumps(_described(values))
        self.send(torch.tensor([len(described)], device=self._device), to)
        self.send(torch.frombuffer(bytearray(described), dtype=torch.uint8).to(self._device), to)
        for value in values.values():
            if isinstance(value, torch.Tensor):
                self.send(value.contiguous(), to)

    def recv_tensor_dict(self, source: int) -> dict[str, Any]:
        """Receive the values that rank ``source`` sends by :meth:`send_tensor_dict`."""
        size = int(self.recv((1,), torch.int64, source))
        described = pickle.loads(self.recv((size,), torch.uint8, source).cpu().numpy().tobytes())
        return {
            name: self.recv(value.shape, value.dtype, source) if isinstance(value, torch.Tensor) else value
            for name, value in described.items()
        }

    @property
    def _device(self) -> torch.device:
        return current_platform.get_group_coordinator_device(self.rank)

    def _held(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or memory for the one that it describes."""
        return torch.empty(x.shape, dtype=x.dtype, device=self._device) if x.is_meta else x.contiguous()

    def close(self) -> None:
        """Leave the group."""

    def share(self, size: int, what: str) -> int:
        """Return one rank's part of ``size``; ConfigError if it cannot be divided evenly."""
        return share_of(size, self.world_size, what)


def share_of(size: int, ranks: int, what: str) -> int:
    """Return one of ``ranks`` equal parts of ``size``; ConfigError if it cannot be divided evenly."""
    if size % ranks:
        raise ConfigError(f"tp_size={ranks} does not divide {what} ({size}): choose a tp_size that does")
    return size // ranks


class TorchCommunicator(Communicator):
    """``torch.distributed`` with the platform's backend. ``init_method`` is the URL where the ranks meet."""

    def __init__(self, rank: int, world_size: int, init_method: str) -> None:
        self._join(rank, list(range(world_size)), None)
        dist.init_process_group(self.backend(), init_method=init_method, rank=rank, world_size=world_size)

    @classmethod
    def backend(cls) -> str:
        """The name for ``init_process_group``."""
        return current_platform.get_torch_distributed_backend_str()

    @classmethod
    def of_group(cls, group: Any, ranks: Sequence[int], rank: int) -> TorchCommunicator:
        """Join a group that an engine has made: ``ranks`` of the world, this one the ``rank``-th."""
        made = cls.__new__(cls)
        made._join(rank, list(ranks), group)
        return made

    def _join(self, rank: int, ranks: list[int], group: Any) -> None:
        self.rank = rank
        self.world_size = len(ranks)
        self._ranks = ranks
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.world_size)]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.cat(parts, dim=dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        self.share(x.shape[dim], f"dimension {dim}")
        parts = [part.contiguous() for part in x.chunk(self.world_size, dim=dim)]
        output = torch.empty_like(parts[0])
        dist.reduce_scatter(output, parts, group=self._group)
        return output

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        dist.broadcast(x, src=self._ranks[source], group=self._group)
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        dist.send(x.contiguous(), dst=self._ranks[to], group=self._group)

    def recv(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        x = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        dist.recv(x, src=self._ranks[source], group=self._group)
        return x

    def gather_objects(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def close(self) -> None:
        dist.destroy_process_group()


class FlagCXCommunicator(TorchCommunicator):
    """FlagCX, by the backend that its plugin for torch registers. ``FLAGCX_PATH`` is where it was built."""

    @classmethod
    def backend(cls) -> str:
        """:raises ConfigError: the plugin is not at the path, nor installed."""
        plugin = Path(env.text("FLAGCX_PATH") or "") / "plugin" / "torch"
        if plugin.is_dir() and str(plugin) not in sys.path:
            sys.path.append(str(plugin))
        try:
            importlib.import_module("flagcx")
        except ImportError as error:
            raise ConfigError(
                f"FLAGCX_PATH={env.text('FLAGCX_PATH')!r}: its plugin for torch cannot be imported "
                f"({error}): build it in plugin/torch, or unset the variable"
            ) from error
        return "flagcx"


def _described(values: dict[str, Any]) -> dict[str, Any]:
    """Replace tensors by their shapes and types, which a rank needs before they arrive."""
    return {
        name: torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def make_communicator(rank: int, world_size: int, init_method: str) -> Communicator:
    """Make the platform's own class; else FlagCX if FLAGCX_PATH is set. A single rank joins no group."""
    if world_size == 1:
        return Communicator()
    usual = TorchCommunicator if env.text("FLAGCX_PATH") is None else FlagCXCommunicator
    chosen = class_of(current_platform.get_communicator_class, usual=usual, has=_COLLECTIVES)
    communicator: Communicator = chosen(rank, world_size, init_method)
    return communicator
