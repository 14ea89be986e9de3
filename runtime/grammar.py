"""Output that a JSON schema allows, through the library llguidance (the package's extra "json").

The caller's process checks a schema before it sends it; the scheduler's compiles it against the tokenizer and
holds one Grammar for each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sgl_aspects.errors import InvalidRequestError
from sgl_aspects.packages import hint
from sgl_aspects.runtime.loader.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

#: A schema that needs more than this many states is refused while it is used: a state takes about 2 kB.
_MAX_LEXER_STATES = 50_000
#: Compiling a longer schema would keep the scheduler from all other requests for seconds.
_MAX_SCHEMA_LENGTH = 1 << 16


def check_json_schema(schema: str) -> None:
    """Raise InvalidRequestError if the schema is invalid, or the library does not support it."""
    if len(schema) > _MAX_SCHEMA_LENGTH:
        raise InvalidRequestError(
            f"json_schema has {len(schema)} characters; at most {_MAX_SCHEMA_LENGTH} are taken"
        )
    problem = _library().LLMatcher.validate_grammar(_grammar_text(schema), limits=_limits())
    if problem and not problem.startswith("WARNING"):
        raise InvalidRequestError(f"json_schema cannot be used: {problem}")


class Grammar:
    """The progress of one request's output in its schema."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed_tokens(self) -> torch.Tensor:
        """[vocab], bool, on the host."""
        import torch  # not before: the caller's process checks schemas without it

        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        return torch.from_numpy(allowed).bool()

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)

    @property
    def is_complete(self) -> bool:
        """Return whether nothing may follow."""
        return bool(self._matcher.is_stopped())

    @property
    def error(self) -> str:
        """The error, such as a schema that takes too much work; "" for none."""
        return str(self._matcher.get_error())


class GrammarCompiler:
    """Reads the tokenizer, for about a second, when the first schema comes."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = _library().LLTokenizer(
            tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
        )

    def compile(self, schema: str) -> Grammar:
        grammar = _grammar_text(schema)
        matcher = _library().LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise InvalidRequestError(f"json_schema cannot be used: {matcher.get_error()}")
        return Grammar(matcher, self._vocab_size)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidRequestError(
            f"json_schema needs the package llguidance: {hint('llguidance')}"
        ) from error
    return llguidance


def _limits() -> Any:
    return _library().LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)


def _grammar_text(schema: str) -> str:
    try:
        return str(_library().LLMatcher.grammar_from_json_schema(schema))
    except ValueError as error:
        raise InvalidRequestError(f"json_schema is not a JSON schema: {error}") from error
