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
from sgl_aspects.runtime.core import Batch, ForwardBatch, ForwardMode

if TYPE_CHECKING:
    from sgl_aspects.runtime.execution.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class GraphRunner:
    """The interface of ``SRTPlatform.get_graph_runner_cls``. A vendor's own has these three methods."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self._runner = model_runner
        self._platform = model_runner.platform
        self.sizes = capture_sizes(model_runner.server_args.max_running_requests)
        largest = self.sizes[-1]
        pinned = self._platform.is_pin_memory_available()
        #: Token ids, positions and rows of the slots, one column a request. Two on the host, in turns:
        #: the device may still read the one of the step before.
        self._host_inputs = [torch.zeros(3, largest, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._inputs = torch.zeros(3, largest, dtype=torch.int64, device=model_runner.device)
        #: By size: the graph, and its logits [size, vocab_size], which each replay writes again.
        self._captured: dict[int, tuple[DeviceGraph, torch.Tensor]] = {}

    # -- capturing -----------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture every size, once the model is loaded and after each change of weights."""
        start = time.perf_counter()
        self._captured.clear()
        self._inputs.zero_()
        self._inputs[2] = self._runner.req_to_token_pool.padding_row
        for size in self.sizes[::-1]:  # the largest first: the smaller ones reuse its memory
            self._captured[size] = self.capture_size(size)
        logger.info(
            "captured %s for batches of %s in %.1f s",
            self._platform.get_graph_label(),
            ", ".join(map(str, self.sizes)),
            time.perf_counter() - start,
        )

    def capture_size(self, size: int) -> tuple[DeviceGraph, torch.Tensor]:
        """One graph of a decode step for ``size`` requests."""
        with self._platform.inference_mode():
            for _ in range(
                2
            ):  # libraries choose and compile their kernels at a first call, not while capturing
                self._decode(size)
            self._platform.synchronize()
            graph = self._platform.create_graph()
            return graph, graph.capture(lambda: self._decode(size))

    def _decode(self, size: int) -> torch.Tensor:
        """Compute logits [size, vocab_size] from the inputs: the captured work."""
        runner = self._runner
        token_ids, positions, rows = self._inputs[:, :size].unbind(0)
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=token_ids,
            positions=positions,
            req_pool_indices=rows,
            num_decodes=size,
            num_new_tokens=[1] * size,
            lengths=[runner.context_length] * size,  # the worst case: the real ones are on the device
            attention_backend=runner.attention_backend,
            req_to_token_pool=runner.req_to_token_pool,
        )
        return runner.compute_logits(batch)

    # -- replaying -----------------------------------------------------------------------------------

    def can_run(self, batch: Batch) -> bool:
        """Return whether there is a graph for ``batch``: it only decodes, and is not too large."""
        return batch.forward_mode is ForwardMode.DECODE and batch.batch_size <= self.sizes[-1]

    def replay(self, batch: Batch) -> torch.Tensor:
        """Replay: logits [batch_size, vocab_size], in memory that the next replay of this size overwrites."""
        count = batch.batch_size
        size = next(size for size in self.sizes if size >= count)
        self._host_inputs.reverse()
        host = self._host_inputs[0]
        padding = [0] * (size - count)
        ahead = 0 if batch.follows is None else 1  # the previous step's token is not counted yet
        host[:, :size] = torch.tensor(
            [
                [req.last_token for req in batch.reqs] + padding,
                [req.computed_tokens + ahead for req in batch.reqs] + padding,
                [req.row for req in batch.reqs] + [self._runner.req_to_token_pool.padding_row] * len(padding),
            ]
        )
        self._inputs.copy_(host, non_blocking=True)
        if batch.follows is not None:
            self._inputs[0, :count].copy_(batch.follows.on_device)
        graph, logits = self._captured[size]
        graph.replay()
        return logits[:count]


def capture_sizes(max_batch_size: int) -> list[int]:
    """1, 2, 4, every 8th up to 64, every 32nd beyond, and ``max_batch_size`` itself."""
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, max_batch_size, 32)]
    return [*(size for size in steps if size < max_batch_size), max_batch_size]
