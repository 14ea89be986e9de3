"""SamplingParams: how the next token of one request is chosen, and when the request ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeGuard

from sgl_aspects.errors import InvalidRequestError


@dataclass(frozen=True)
class SamplingParams:
    """Checked when it is made: a value out of range is an InvalidRequestError.

    The order is the one transformers uses: temperature, then top_k, then top_p over what top_k left.
    """

    max_new_tokens: int = 128
    #: 0 takes the likeliest token (greedy); no other field below has an effect on the choice then.
    temperature: float = 0.0
    #: Keep the fewest likeliest tokens whose probabilities reach this sum.
    top_p: float = 1.0
    #: Keep this many of the likeliest tokens; None keeps all.
    top_k: int | None = None
    #: The same seed, prompt and settings give the same tokens, whatever else is in the batch.
    seed: int | None = None
    #: Tokens that end the request, beside the model's own end-of-text tokens.
    stop_token_ids: Sequence[int] = ()
    #: Texts that end the request; they are not part of its text.
    stop: Sequence[str] = ()
    #: Go on past the model's own end-of-text tokens.
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not _is_integer(self.max_new_tokens) or self.max_new_tokens < 1:
            _refuse("max_new_tokens", self.max_new_tokens, "a whole number of at least 1")
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            _refuse("temperature", self.temperature, "a finite number of at least 0 (0 is greedy)")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "a number above 0 and up to 1")
        if self.top_k is not None and (not _is_integer(self.top_k) or self.top_k < 1):
            _refuse("top_k", self.top_k, "a whole number of at least 1, or None for all tokens")
        if self.seed is not None and not _is_integer(self.seed):
            _refuse("seed", self.seed, "a whole number, or None")
        stops: object = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not _is_list_of(stops, str) or "" in stops:
            _refuse("stop", self.stop, "a text or a list of texts, none of them empty")
        if not _is_list_of(self.stop_token_ids, int):
            _refuse("stop_token_ids", self.stop_token_ids, "a list of token ids")
        object.__setattr__(self, "stop", tuple(stops))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", self.ignore_eos, "True or False")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


def _refuse(name: str, value: object, choices: str) -> NoReturn:
    raise InvalidRequestError(f"{name}={value!r}: write {choices}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(values: object, kind: type) -> TypeGuard[Sequence[Any]]:
    return isinstance(values, Sequence) and all(isinstance(value, kind) for value in values)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
