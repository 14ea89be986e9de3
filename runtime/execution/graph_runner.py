"""GraphRunner: decode steps that the device records once, for a few batch sizes, and then replays.

A decode step is hundreds of small pieces of work, and for a small batch the host needs longer to hand them
over than the device to do them. A graph is handed over at once:

    inputs, at fixed addresses            graph for 4 requests            logits, at a fixed address
    token ids   │ 17  5 91  0             req_to_token → slots, lengths   row 0 │ of request 0
    positions   │  8  2 33  0    ───►     model, attention over    ───►   row 1 │ of request 1
    rows        │  1  0  4  z             the pages of each row           row 2 │ of request 2
                            └ padding: three requests run as four         row 3 │ unused

Padding points at the last row of ``req_to_token``, which is always empty, so that what it writes goes to
slot 0. Everything that changes from step to step is read from tensors: sizes that the host would decide on
are decided for the worst case when the graph is captured.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from sgl_aspects.platforms import DeviceGraph
from sgl_aspects.runtime.core import Batch, ForwardMode

if TYPE_CHECKING:
    from sgl_aspects.runtime.execution.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class GraphRunner:
    """The interface of ``SRTPlatform.get_graph_runner_cls``. A vendor's own has these three methods."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self._runner = model_runner
        self._platform = model_runner.platform
        self.sizes = capture_sizes(model_runner.server_args.max_running_requests)
        #: By size: the inputs, the graph, and its logits [size, vocab_size], which each replay writes again.
        self._captured: dict[int, tuple[torch.Tensor, DeviceGraph, torch.Tensor]] = {}

    def capture(self) -> None:
        """Called once the model is loaded and the cache made, and after each change of weights if
        ``needs_graph_recapture()``: capture decode steps for the numbers of requests that are to be replayed.
        """
        start = time.perf_counter()
        self._captured.clear()
        for size in self.sizes[::-1]:  # the largest first: the smaller ones reuse its memory
            self._captured[size] = self.capture_size(size)
        logger.info(
            "captured %s for batches of %s in %.1f s",
            self._platform.get_graph_label(),
            ", ".join(map(str, self.sizes)),
            time.perf_counter() - start,
        )

    def capture_size(self, size: int) -> tuple[torch.Tensor, DeviceGraph, torch.Tensor]:
        """One graph of a decode step for ``size`` requests."""
        inputs = self._runner.decode_inputs(size)
        with self._platform.inference_mode():
            # Libraries choose and compile their kernels at a first call, not while capturing.
            for _ in range(2):
                self._runner.decode(inputs)
            self._platform.synchronize()
            graph = self._platform.create_graph()
            return inputs, graph, graph.capture(lambda: self._runner.decode(inputs))

    def can_run(self, batch: Batch) -> bool:
        """Called before each step, once or several times, with ``batch.batch_size`` requests and
        ``batch.forward_mode``: return whether there is a graph, which there may be for decode steps alone.
        """
        return batch.forward_mode is ForwardMode.DECODE and batch.batch_size <= self.sizes[-1]

    def replay(self, batch: Batch) -> torch.Tensor:
        """Called in place of the step where ``can_run(batch)``: return logits [batch_size, vocab_size], which
        are read before the next replay. The host does not wait.
        """
        size = next(size for size in self.sizes if size >= batch.batch_size)
        inputs, graph, logits = self._captured[size]
        self._runner.write_decode_inputs(batch, inputs)
        graph.replay()
        return logits[: batch.batch_size]


def capture_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, every 8th up to 64, every 32nd beyond, and ``max_batch_size`` itself."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, max_batch_size, 32)]
    return [*(size for size in steps if size < max_batch_size), max_batch_size]
