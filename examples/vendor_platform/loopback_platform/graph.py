"""Graphs: the work is kept, and each replay writes its results over those of the capture."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from sgl_aspects.platforms import DeviceGraph

_state = threading.local()


def is_capturing() -> bool:
    return getattr(_state, "capturing", False)


class LoopbackGraph(DeviceGraph):
    def capture(self, work: Callable[[], Any]) -> Any:
        _state.capturing = True
        try:
            self._output = work()
        finally:
            _state.capturing = False
        self._work = work
        return self._output

    def replay(self) -> None:
        for kept, new in zip(_tensors(self._output), _tensors(self._work())):
            kept.copy_(new)


def _tensors(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else list(output)
