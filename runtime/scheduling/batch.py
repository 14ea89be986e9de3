"""Req and Batch: the only nouns of the scheduler."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sgl_aspects.errors import EngineError
from sgl_aspects.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sgl_aspects.runtime.kv_cache.prefix_cache import Node
    from sgl_aspects.runtime.sampling.sampled_tokens import SampledTokens
    from sgl_aspects.runtime.scheduling.grammar import Grammar


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
