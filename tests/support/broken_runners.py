"""The loopback platform with broken graph runners and communicators."""

from __future__ import annotations

from typing import Any

import torch
from loopback_platform.platform import LoopbackPlatform

from sgl_aspects.runtime.communicator import TorchCommunicator
from sgl_aspects.runtime.core import ForwardBatch
from sgl_aspects.runtime.execution.graph_runner import GraphRunner
from tests.support.broken_platforms import found_by


@found_by("graphs.decode_steps")
class ComputesOnTheHost(LoopbackPlatform):
    """Its graph runner captures, and then computes each step as if there were no graph."""

    def get_graph_runner_cls(self) -> type | str:
        return _Eager


class _Eager(GraphRunner):
    def replay(self, batch: Any) -> torch.Tensor:
        runner = self._runner
        step = ForwardBatch.of(batch, runner.attention_backend, runner.req_to_token_pool)
        return runner.compute_logits(step)


@found_by("graphs.decode_steps")
class ReplaysNoStep(LoopbackPlatform):
    """Its graph runner has a graph for no batch."""

    def get_graph_runner_cls(self) -> type | str:
        return _RunsNothing


class _RunsNothing(GraphRunner):
    def can_run(self, batch: Any) -> bool:
        return False


class ScattersNothing(LoopbackPlatform):
    """Its reduce_scatter leaves the whole sum on each rank."""

    def get_communicator_class(self) -> type | str:
        return _NoScatter


class _NoScatter(TorchCommunicator):
    def reduce_scatter(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return self.all_reduce(x)


class HearsNoTensors(LoopbackPlatform):
    """One rank fails while the other sends."""

    def get_communicator_class(self) -> type | str:
        return _Deaf


class _Deaf(TorchCommunicator):
    def recv_tensor_dict(self, source: int) -> dict[str, Any]:
        raise OSError("link down")
