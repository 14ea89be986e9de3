"""One HTTP request and its response: what an observer of the server notes, whatever engine answers."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# What is asked for at paths that end so: OpenAI's names, Anthropic's, and those of the engines themselves.
_OPERATIONS = {
    "chat": ("/chat/completions", "/messages", "/responses", "/chat"),
    "embeddings": ("/embeddings", "/embed", "/encode", "/pooling"),
    "text_completion": ("/completions", "/generate"),
}


def operation_of(path: str) -> str | None:
    """The GenAI operation that is asked for at a path; None where no model is to be run."""
    for operation, endings in _OPERATIONS.items():
        if path.endswith(endings):
            return operation
    return None


@dataclass(eq=False)
class Exchange:
    """One HTTP request and its response, in nanoseconds since the epoch; 0: not yet.

    ``scope``: what ASGI says of the request. ``status``, ``response_id``: the response's. ``is_taken``: it is
    an engine's request; further ones in the same exchange have times of their own. ``is_whole``: the client
    got all of the response. ``tokenized``: what an engine tokenized before it had a request (start, end,
    tokens, error), in order. ``at_end``: called when the response is complete, or its client is gone.
    """

    scope: Mapping[str, Any]
    start_ns: int
    first_ns: int = 0
    status: int = 0
    response_id: str = ""
    is_taken: bool = False
    is_whole: bool = False
    tokenized: list[tuple[int, int, int | None, str]] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def path(self) -> str:
        return str(self.scope.get("path", ""))

    @property
    def headers(self) -> dict[str, str]:
        pairs: Sequence[tuple[bytes, bytes]] = self.scope.get("headers", ())
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in pairs}


# Set in the task that serves an HTTP request, and so in those that it starts.
current_exchange: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar(
    "sgl_aspects_exchange", default=None
)
