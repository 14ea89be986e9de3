"""HTTP exchanges: a request and its response, as the server's observer records them for any engine."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sgl_aspects.tracing.records import AttributeValue

# Operations by the end of the path: OpenAI's names, Anthropic's, and the engines' own.
_OPERATIONS = {
    "chat": ("/chat/completions", "/completions/batch", "/messages", "/responses", "/chat"),
    "embeddings": ("/embeddings", "/embed", "/encode", "/pooling", "/classify"),
    "rerank": ("/rerank", "/score", "_scoring", "/decisions", "/systemone"),
    "text_completion": ("/completions", "/generate", "/audio/transcriptions", "/audio/translations"),
    "generate_content": ("/images/generations", "/images/edits", "/videos"),
}


def operation_of(path: str) -> str | None:
    """Return the GenAI operation of a path; None if it does not run a model."""
    for operation, endings in _OPERATIONS.items():
        if path.endswith(endings):
            return operation
    return None


#: Work for a request: start, end, the attributes of its span, and the error.
Part: TypeAlias = "tuple[int, int, tuple[AttributeValue, ...], str]"


@dataclass(eq=False)
class Exchange:
    """One HTTP request and its response, in nanoseconds of ``monotonic_ns``; 0: not yet.

    ``scope``: ASGI's. ``status``, ``response_id``: the response's. ``is_taken``: an engine's request is this
    exchange's; further ones in it have times of their own (``is_shared``). ``is_over``: it has ended.
    ``is_whole``: the client got all of the response. ``tokenized``, ``templated``: tokenizations and uses of
    a chat template before the request began, in order. ``at_end``: called when the response is complete, or
    its client gone. ``unread``: first begin, last end and total of the times in which the buffers were full,
    since the client did not read; empty if they never were. ``parsed_ns``: what parsing the answer has taken.
    ``is_gone``: tells whether the client has hung up.
    """

    scope: Mapping[str, Any]
    start_ns: int
    first_ns: int = 0
    status: int = 0
    response_id: str = ""
    is_taken: bool = False
    is_shared: bool = False
    is_over: bool = False
    is_whole: bool = False
    tokenized: list[Part] = field(default_factory=list)
    templated: list[Part] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    parsed_ns: int = 0
    is_parsing: bool = False
    is_templating: bool = False
    is_gone: Callable[[], bool] = bool

    @property
    def path(self) -> str:
        return str(self.scope.get("path", ""))

    @property
    def headers(self) -> dict[str, str]:
        pairs: Sequence[tuple[bytes, bytes]] = self.scope.get("headers", ())
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}


#: The open ones, by the identity of their scope: for threads of a pool, which have no context.
open_exchanges: dict[int, Exchange] = {}

# Set in the task that serves an HTTP request, and inherited by the tasks that it starts.
current_exchange: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar(
    "sgl_aspects_exchange", default=None
)
