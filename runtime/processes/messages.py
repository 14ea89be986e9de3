"""The messages between the caller's process and the scheduler's.

Plain data that pickles small. Requests go to the scheduler one by one; the outputs of a step come back as one
list of TokenOutput.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sgl_aspects.errors import EngineError
from sgl_aspects.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sgl_aspects.runtime.sampling.logprobs import TokenLogprobs

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
