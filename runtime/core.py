"""Requests, batches, and their tokens on the device: the objects that folders of the engine share.

Req            one request in the scheduler
Batch          the requests of one step, as the scheduler chose them
ForwardBatch   the same as the model sees it, in tensors on the device
SampledTokens  the tokens that the step gave, on their way to the host
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sgl_aspects.errors import EngineError
from sgl_aspects.platforms import DeviceEvent, SRTPlatform
from sgl_aspects.runtime.messages import TokenLogprobs
from sgl_aspects.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sgl_aspects.runtime.grammar import Grammar
    from sgl_aspects.runtime.kv_cache.pages import ReqToTokenPool
    from sgl_aspects.runtime.kv_cache.prefix_cache import Node


class ForwardMode(enum.Enum):
    #: Only prompts, or chunks of them.
    EXTEND = "extend"
    #: Only requests that get their next token.
    DECODE = "decode"
    #: Both in one step, the decoding requests first.
    MIXED = "mixed"

    # The questions of SGLang's modes, for attention backends.

    def is_decode(self) -> bool:
        return self is ForwardMode.DECODE

    def is_extend(self) -> bool:
        return self is not ForwardMode.DECODE

    def is_mixed(self) -> bool:
        return self is ForwardMode.MIXED

    def is_idle(self) -> bool:
        """Return False: there is no step without requests."""
        return False


@dataclass(eq=False)
class Req:
    """One request in the scheduler, from arrival to its last token."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    #: Draws one number for each sampled token, so that a seed gives the same text in any batch.
    random: random.Random
    #: Among equal priorities, the one that arrived first goes first.
    arrival: int = 0
    output_ids: list[int] = field(default_factory=list)
    #: Prompt tokens that were found in the prefix cache when the request was first added.
    cached_tokens: int = 0
    #: Tokens whose keys and values are in the cache.
    computed_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    #: How many of the pages, from the first on, are the prefix tree's, and where they end in it.
    shared_pages: int = 0
    prefix: Node | None = None
    #: Row of ``req_to_token``; -1 while waiting.
    row: int = -1
    #: Stays true when the request is preempted and waits again.
    was_added: bool = False
    finish_reason: str | None = None
    #: The error, if the reason is "error".
    error: EngineError | None = None
    #: Whether the last token only ended the request and is not part of the text.
    has_end_token: bool = False
    #: Constrains the output, if the request has a schema.
    grammar: Grammar | None = None

    @property
    def total_tokens(self) -> int:
        return len(self.input_ids) + len(self.output_ids)

    @property
    def max_total_tokens(self) -> int:
        return len(self.input_ids) + self.max_new_tokens

    @property
    def max_new_tokens(self) -> int:
        """The number that the owner has set if it was None."""
        return self.sampling_params.max_new_tokens or 0

    @property
    def priority(self) -> int:
        return self.sampling_params.priority

    @property
    def precedence(self) -> tuple[int, int]:
        """The lower is served first, and preempted last."""
        return -self.priority, self.arrival

    @property
    def is_prefill_done(self) -> bool:
        """Return whether only the token sampled last is to be computed. A preempted request has more."""
        return bool(self.output_ids) and self.computed_tokens >= self.total_tokens - 1

    @property
    def prefill_tokens_left(self) -> int:
        return 0 if self.is_prefill_done else self.total_tokens - self.computed_tokens

    @property
    def last_token(self) -> int:
        return self.output_ids[-1] if self.output_ids else self.input_ids[-1]

    def tokens_between(self, start: int, end: int) -> list[int]:
        """The tokens at positions ``start`` up to ``end`` of prompt and output together."""
        prompt = len(self.input_ids)
        if start >= prompt:
            return self.output_ids[start - prompt : end - prompt]
        return (self.input_ids[start:end] + self.output_ids[: max(end - prompt, 0)])[: end - start]


@dataclass(eq=False)
class Batch:
    """The input of one step: the next ``num_new_tokens[i]`` tokens of ``reqs[i]``."""

    forward_mode: ForwardMode
    reqs: list[Req]
    num_new_tokens: list[int]
    #: For each request, whether this step gives its next token: not where prompt is left.
    samples: list[bool]
    step_id: int
    #: How many of the requests, all at the front, feed one token and get their next.
    num_decodes: int
    #: Where the batch before is still on the device: the tokens that these requests get from it.
    follows: SampledTokens | None = None

    @property
    def batch_size(self) -> int:
        return len(self.reqs)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_new_tokens)


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
    #: An :class:`~sgl_aspects.runtime.attention.base.AttentionBackend`, or a vendor's of that interface.
    attention_backend: Any
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
        """[requests], on the device: the tokens of each request, with those of this step."""
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
    def of(cls, batch: Batch, backend: Any, pool: ReqToTokenPool) -> ForwardBatch:
        device = pool.req_to_token.device
        input_ids: list[int] = []
        positions: list[int] = []
        for req, count in zip(batch.reqs, batch.num_new_tokens):
            start = req.computed_tokens
            input_ids += req.tokens_between(start, start + count)
            positions += range(start, start + count)
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


class SampledTokens:
    """One token a request. Made without waiting, so that more work can be given to the device meanwhile."""

    def __init__(self, on_device: torch.Tensor, platform: SRTPlatform) -> None:
        #: For each request, if any requests them.
        self.logprobs: list[TokenLogprobs | None] = []
        #: [requests]
        self.on_device = on_device
        self._host = on_device
        self._arrived: DeviceEvent | None = None
        if platform.is_asynchronous():
            # Querying the device itself would wait for all work queued since.
            self._host = torch.empty(
                on_device.shape,
                dtype=on_device.dtype,
                device="cpu",
                pin_memory=platform.is_pin_memory_available(),
            )
            self._host.copy_(on_device, non_blocking=True)
            self._arrived = platform.create_event()
            self._arrived.record()

    def tolist(self) -> list[int]:
        """Return the tokens; waits until they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens: list[int] = self._host.tolist()
        return tokens
