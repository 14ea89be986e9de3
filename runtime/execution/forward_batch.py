"""ForwardBatch: a batch as the model sees it, in tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from sgl_aspects.runtime.scheduling.batch import Batch, ForwardMode

if TYPE_CHECKING:
    from sgl_aspects.runtime.attention.base import AttentionBackend


@dataclass(eq=False)
class ForwardBatch:
    """The tokens of all requests of a step, one after the other; the decoding ones first, a token each."""

    forward_mode: ForwardMode
    #: [tokens]
    input_ids: torch.Tensor
    #: [tokens]: the position of each token in its request.
    positions: torch.Tensor
    #: [requests]: rows of the page table.
    rows: torch.Tensor
    num_decodes: int
    #: Per request: tokens of this step, and tokens in the cache once the step is done.
    num_new_tokens: list[int]
    lengths: list[int]
    attention_backend: AttentionBackend

    @cached_property
    def slots(self) -> torch.Tensor:
        """[tokens]: the slots of each token's keys and values. Computed on first use by a backend."""
        rows = self.rows
        if self.forward_mode is not ForwardMode.DECODE:
            rows = rows.repeat_interleave(torch.tensor(self.num_new_tokens, device=rows.device))
        return self.attention_backend.page_table.slots(rows, self.positions)

    @cached_property
    def device_lengths(self) -> torch.Tensor:
        """[requests]: ``lengths``, on the device."""
        return self.last_tokens(self.positions) + 1

    def last_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``x`` [tokens, …] for each request's last token: [requests, …]."""
        if self.forward_mode is ForwardMode.DECODE:
            return x
        return x.index_select(0, self._last_token_indices)

    @cached_property
    def _last_token_indices(self) -> torch.Tensor:
        return torch.tensor(list(accumulate(self.num_new_tokens)), device=self.positions.device).sub_(1)

    @classmethod
    def of(cls, batch: Batch, backend: AttentionBackend, device: torch.device) -> ForwardBatch:
        input_ids: list[int] = []
        positions: list[int] = []
        for req, count in zip(batch.reqs, batch.num_new_tokens):
            start = req.computed_tokens
            if count == 1 and req.output_ids and start + 1 == req.total_tokens:
                input_ids.append(req.output_ids[-1])
                positions.append(start)
            else:
                input_ids.extend(req.tokens_between(start, start + count))
                positions.extend(range(start, start + count))
        return cls(
            forward_mode=batch.forward_mode,
            input_ids=torch.tensor(input_ids, device=device),
            positions=torch.tensor(positions, device=device),
            rows=torch.tensor([req.row for req in batch.reqs], device=device),
            num_decodes=batch.num_decodes,
            num_new_tokens=batch.num_new_tokens,
            lengths=[req.computed_tokens + count for req, count in zip(batch.reqs, batch.num_new_tokens)],
            attention_backend=backend,
        )
