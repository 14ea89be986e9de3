"""SamplingParams: how the next token of one request is chosen, and when the request ends."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeGuard

from sgl_aspects.errors import InvalidRequestError
from sgl_aspects.runtime.checks import check_integer, is_integer, is_number, is_seed

MAX_CHOICES = 128
MAX_PRIORITY = 1000
MAX_TOP_LOGPROBS = 20
#: Every stop text is looked for at every token.
MAX_STOP_TEXTS = 64
MAX_STOP_TEXT_LENGTH = 1024
#: Entries of ``stop_token_ids`` and of ``logit_bias``.
MAX_TOKEN_ENTRIES = 1024
#: From the least that is allowed to the most.
RANGES = {
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
}


@dataclass(frozen=True)
class SamplingParams:
    """Checked when it is made: a value out of range is an InvalidRequestError that names field and range.

    The order is the one transformers uses: penalties, biases and forbidden tokens first, then temperature,
    top_k, top_p over what top_k left, min_p.
    """

    #: None: the rest of the context length and of the key-value cache after the prompt.
    max_new_tokens: int | None = 128
    #: 0 takes the likeliest token (greedy); seed, top_k, top_p and min_p have no effect then.
    temperature: float = 0.0
    #: Keep the fewest likeliest tokens whose probabilities reach this sum.
    top_p: float = 1.0
    #: Keep this many of the likeliest tokens; None keeps all.
    top_k: int | None = None
    #: Keep the tokens that are at least this share of the likeliest one's probability.
    min_p: float = 0.0
    #: Above 1 makes tokens of prompt and output less likely: positive logits are divided by it, negative ones
    #: multiplied.
    repetition_penalty: float = 1.0
    #: Taken from a token's logit for each time that it is in the output.
    frequency_penalty: float = 0.0
    #: Taken from a token's logit once it is in the output.
    presence_penalty: float = 0.0
    #: Added to the logits of these tokens.
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    #: The same seed, prompt and settings give the same tokens, whatever else is in the batch.
    seed: int | None = None
    #: End tokens and stop texts do not count before this number of tokens.
    min_new_tokens: int = 0
    #: Tokens that end the request, beside the model's own end-of-text tokens.
    stop_token_ids: Sequence[int] = ()
    #: Texts that end the request; they are not part of its text.
    stop: Sequence[str] = ()
    #: Continue past the model's own end-of-text tokens.
    ignore_eos: bool = False
    #: Return each token's log probability, and those of this number of top tokens; None: neither. Of the
    #: model's own distribution, before penalties and temperature.
    logprobs: int | None = None
    #: Higher ones are served first, and preempt lower ones if memory is short.
    priority: int = 0
    #: Answers to one prompt, each with a seed of its own.
    n: int = 1
    #: The text is JSON that this schema allows: a dict, or JSON text. Needs the package's extra "json".
    json_schema: str | Mapping[str, Any] | None = None
    #: Whether the logits are changed before a token is chosen. Such a request must know its last token.
    adjusts_logits: bool = field(init=False, repr=False, compare=False, default=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", self.ignore_eos, "True or False")
        schema = self.json_schema
        if isinstance(schema, Mapping):
            try:
                schema = json.dumps(schema)
            except (TypeError, ValueError, RecursionError) as error:
                _refuse("json_schema", self.json_schema, f"values that JSON can represent ({error})")
        if schema is not None and not isinstance(schema, str):
            _refuse("json_schema", schema, "a JSON schema as a dict or as text, or None")
        if schema is not None and self.min_new_tokens:
            _refuse(
                "min_new_tokens", self.min_new_tokens, "0 together with json_schema, which determines the end"
            )
        object.__setattr__(self, "json_schema", schema)
        adjusts = self.has_penalties or self.logit_bias or self.min_new_tokens or schema is not None
        object.__setattr__(self, "adjusts_logits", bool(adjusts))

    def _check_numbers(self) -> None:
        if self.max_new_tokens is not None:
            check_integer(InvalidRequestError, self, "max_new_tokens", 1)
        check_integer(InvalidRequestError, self, "min_new_tokens", 0)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            _refuse("min_new_tokens", self.min_new_tokens, f"at most max_new_tokens={self.max_new_tokens}")
        if not is_number(self.temperature) or not 0 <= self.temperature <= sys.float_info.max:
            _refuse("temperature", self.temperature, "a finite number of at least 0 (0 is greedy)")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "a number above 0 and up to 1")
        if self.top_k is not None and (not is_integer(self.top_k) or self.top_k < 1):
            _refuse("top_k", self.top_k, "a whole number of at least 1, or None for all tokens")
        for name, (lowest, highest) in RANGES.items():
            value = getattr(self, name)
            if not is_number(value) or not lowest <= value <= highest:
                _refuse(name, value, f"a number from {lowest} to {highest}")
        if self.seed is not None and not is_seed(self.seed):
            _refuse("seed", self.seed, "a whole number of 64 bits, or None")
        if self.logprobs is not None:
            check_integer(InvalidRequestError, self, "logprobs", 0, MAX_TOP_LOGPROBS)
        check_integer(InvalidRequestError, self, "n", 1, MAX_CHOICES)
        check_integer(InvalidRequestError, self, "priority", -MAX_PRIORITY, MAX_PRIORITY)

    def _check_lists(self) -> None:
        stops: object = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not _is_list_of(stops, str) or "" in stops:
            _refuse("stop", self.stop, "a text or a list of texts, none of them empty")
        if len(stops) > MAX_STOP_TEXTS or any(len(text) > MAX_STOP_TEXT_LENGTH for text in stops):
            most = f"at most {MAX_STOP_TEXTS} texts of at most {MAX_STOP_TEXT_LENGTH} characters"
            _refuse("stop", self.stop, most)
        if not _is_list_of(self.stop_token_ids, int) or len(self.stop_token_ids) > MAX_TOKEN_ENTRIES:
            _refuse("stop_token_ids", self.stop_token_ids, f"a list of at most {MAX_TOKEN_ENTRIES} token ids")
        object.__setattr__(self, "stop", tuple(stops))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        biases = self.logit_bias
        if not isinstance(biases, Mapping) or not all(
            is_integer(token) and is_number(bias) and -100 <= bias <= 100 for token, bias in biases.items()
        ):
            _refuse("logit_bias", biases, "a dict of token ids and numbers from -100 to 100")
        if len(biases) > MAX_TOKEN_ENTRIES:
            _refuse("logit_bias", biases, f"at most {MAX_TOKEN_ENTRIES} token ids")
        object.__setattr__(self, "logit_bias", dict(biases))

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return bool(self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty)


def _refuse(name: str, value: object, choices: str) -> NoReturn:
    raise InvalidRequestError(f"{name}={reprlib.repr(value)}: write {choices}")


def _is_list_of(values: object, kind: type) -> TypeGuard[Sequence[Any]]:
    return isinstance(values, Sequence) and all(
        isinstance(value, kind) and not isinstance(value, bool) for value in values
    )
