"""The messages between the caller's process and the scheduler's.

Plain data that pickles small. Requests go to the scheduler one by one; the outputs of a step come back as one
list of TokenOutput.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from sgl_aspects.errors import EngineError
from sgl_aspects.runtime.sampling_params import SamplingParams

# Why a request ended: "stop" (an end token or a stop text), "length" (max_new_tokens), "abort", "error".


@dataclass
class TokenizedRequest:
    """To the scheduler: compute this. The scheduler needs no text."""

    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams


@dataclass
class AbortRequest:
    """To the scheduler: end this request now; it answers with finish_reason "abort"."""

    rid: str


@dataclass
class StatsRequest:
    """To the scheduler: answer with a Reply of the same number; see :meth:`Engine.stats` for the keys."""

    number: int = 0


@dataclass
class UpdateWeightsRequest:
    """To the scheduler: load these weights once no answer is under way, then answer with a Reply."""

    model_path: str
    number: int = 0


@dataclass
class ProfileRequest:
    """To the scheduler: profile the next steps; answered at once with a Reply: the files to come, by rank."""

    folder: str
    num_steps: int
    number: int = 0


@dataclass
class ShutdownRequest:
    """To the scheduler: end the process."""


@dataclass
class ReadyMessage:
    """To the caller, once: the model is loaded and requests are welcome."""

    max_total_tokens: int


@dataclass
class FailureMessage:
    """To the caller, last: the scheduler process ends because of this error."""

    #: Name of the error's class: in sgl_aspects.errors, if it is there.
    error_type: str
    message: str
    traceback: str
    #: Where it was raised, as file, line and function.
    place: str
    #: The requests of the scheduler's current step.
    rids: list[str] = field(default_factory=list)
    #: ``time.monotonic_ns`` of the error: the first one of several ranks caused the others.
    time_ns: int = field(default_factory=time.monotonic_ns)


@dataclass(frozen=True)
class TokenLogprobs:
    """One output token; natural logarithms."""

    token_id: int
    logprob: float
    #: The requested number of likeliest tokens, best first.
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class TokenOutput:
    """To the caller: the output of one request in one step."""

    rid: str
    token_ids: list[int]
    finish_reason: str | None = None
    cached_tokens: int = 0
    #: The error, if finish_reason is "error".
    error: EngineError | None = None
    #: Whether the last token only ended the request and is not part of the text.
    has_end_token: bool = False
    #: One for each token, if requested.
    logprobs: list[TokenLogprobs] | None = None


@dataclass
class Reply:
    """To the caller: the answer to the question of this number, or the error that it ended with."""

    number: int
    value: Any = None
    error: EngineError | None = None


@dataclass
class RankLinks:
    """The rank of one scheduler process, and its pipes to the others.

    With tensor parallelism each rank has a process, and each process a whole Scheduler that makes the same
    decisions:

        owner ──► rank 0 ──► rank 1       messages: rank 0 passes on what it gets, before each step
                  rank 0 ◄─► rank 1       tensors: the communicator, in the model and for the sampled tokens
        owner ◄── rank 0                  outputs and answers; the others send nothing but their last error
    """

    rank: int = 0
    world_size: int = 1
    #: Where the communicator's ranks meet.
    init_method: str = ""
    #: Of rank 0: to each of the others. Of another rank: the one from rank 0.
    peers: list[Connection] = field(default_factory=list)
