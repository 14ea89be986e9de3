"""Graphs: work that a device records once and then replays without the host's help."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any


class DeviceGraph(ABC):
    """One captured piece of work. Its inputs and outputs stay at the addresses of the capture."""

    @abstractmethod
    def capture(self, work: Callable[[], Any]) -> Any:
        """Record ``work``; returns what it returned, tensors that each replay writes again.

        ``work`` takes its input from tensors that live as long as the graph. It may be run while it is
        recorded or not: only a replay promises results.
        """

    @abstractmethod
    def replay(self) -> None:
        """Replay with the current values of the input tensors. Allocates nothing."""


class TorchGraph(DeviceGraph):
    """A graph of a torch module that follows ``torch.cuda``: its ``CUDAGraph`` and its ``graph`` context."""

    def __init__(self, graph: Any, context: Callable[[Any], Any]) -> None:
        self._graph = graph
        self._context = context

    def capture(self, work: Callable[[], Any]) -> Any:
        with self._context(self._graph):
            return work()

    def replay(self) -> None:
        self._graph.replay()
