"""ForwardBatch: a batch as the model sees it, in tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sgl_aspects.runtime.scheduling.batch import Batch, ForwardMode

if TYPE_CHECKING:
    from sgl_aspects.runtime.attention.base import AttentionBackend
    from sgl_aspects.runtime.kv_cache.pages import ReqToTokenPool


@dataclass(eq=False)
class ForwardBatch:
    """The tokens of all requests of a step, one after the other; the decoding ones first, a token each.

    Attention backends know it by the names of SGLang's. Tensors that not every backend uses are made when
    they are first read.
    """

    forward_mode: ForwardMode
    #: [tokens]
    input_ids: Tensor
    #: [tokens]: the position of each token in its request.
    positions: Tensor
    #: [requests]: rows of ``req_to_token``.
    req_pool_indices: Tensor
    num_decodes: int
    #: Per request: tokens of this step, and tokens in the cache once the step is done.
    num_new_tokens: list[int]
    lengths: list[int]
    attention_backend: AttentionBackend
    req_to_token_pool: ReqToTokenPool
    #: Of models with an encoder, which this engine does not have.
    encoder_lens: None = None

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @cached_property
    def out_cache_loc(self) -> Tensor:
        """[tokens], int64: the slots of each token's keys and values."""
        rows = self.req_pool_indices
        if not self.forward_mode.is_decode():
            rows = rows.repeat_interleave(self.extend_seq_lens)
        return self.req_to_token_pool.slots(rows, self.positions)

    @cached_property
    def seq_lens(self) -> Tensor:
        """[requests]: ``lengths``, on the device."""
        return self.last_tokens(self.positions) + 1

    @property
    def seq_lens_cpu(self) -> Tensor:
        return torch.tensor(self.lengths, device="cpu")

    @property
    def seq_lens_sum(self) -> int:
        return sum(self.lengths)

    @cached_property
    def extend_seq_lens(self) -> Tensor:
        """[requests]: the tokens of this step."""
        return torch.tensor(self.num_new_tokens, device=self.positions.device)

    @cached_property
    def extend_prefix_lens(self) -> Tensor:
        """[requests]: the tokens in the cache before this step."""
        return torch.tensor(self.extend_prefix_lens_cpu, device=self.positions.device)

    @cached_property
    def extend_start_loc(self) -> Tensor:
        """[requests]: the place of each request's first token in this step."""
        return self.extend_seq_lens.cumsum(0) - self.extend_seq_lens

    @property
    def extend_seq_lens_cpu(self) -> list[int]:
        return self.num_new_tokens

    @property
    def extend_prefix_lens_cpu(self) -> list[int]:
        return [length - new for length, new in zip(self.lengths, self.num_new_tokens)]

    @property
    def extend_num_tokens(self) -> int:
        return sum(self.num_new_tokens)

    def last_tokens(self, x: Tensor) -> Tensor:
        """Return the rows of ``x`` [tokens, …] for each request's last token: [requests, …]."""
        if self.forward_mode.is_decode():
            return x
        return x.index_select(0, self._last_token_indices)

    @cached_property
    def _last_token_indices(self) -> Tensor:
        return torch.tensor(list(accumulate(self.num_new_tokens)), device=self.positions.device).sub_(1)

    @classmethod
    def of(cls, batch: Batch, backend: AttentionBackend, pool: ReqToTokenPool) -> ForwardBatch:
        device = pool.req_to_token.device
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
            req_pool_indices=torch.tensor([req.row for req in batch.reqs], device=device),
            num_decodes=batch.num_decodes,
            num_new_tokens=batch.num_new_tokens,
            lengths=[req.computed_tokens + count for req, count in zip(batch.reqs, batch.num_new_tokens)],
            attention_backend=backend,
            req_to_token_pool=pool,
        )
