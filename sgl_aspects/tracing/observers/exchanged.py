"""Level 1, the HTTP server's side: when a request reached this machine, and when its answer began to leave.

The engine's own functions begin later, when the body is read and checked, and hand over an output before
it is formatted. And a busy event loop reads a request long after it came: 32 requests at once were read up to
100 ms late, which their clients saw as time to first token. The kernel knows when they came.

What is refused before the engine hears of it (a field that is wrong, a model that is not there) has only
this side: a request of its own, that ends with the status of the response.

Known for uvicorn, whatever engine it serves; under another server a request has no exchange, and the engine's
times stand.
"""

from __future__ import annotations

import contextvars
import re
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import time_ns
from typing import Any

from sgl_aspects.engines.base import Engine, Role
from sgl_aspects.tracing import context
from sgl_aspects.tracing.observers.observation import Observation
from sgl_aspects.tracing.options import TraceOptions
from sgl_aspects.tracing.recorder import Recorder
from sgl_aspects.tracing.records import AttributeValue, RequestBegin
from sgl_aspects.tracing.schema import OPERATION, PROVIDER, REQUEST

_SERVER = "uvicorn.protocols.http.*_impl:RequestResponseCycle"
#: The functions of the HTTP server; they belong to no engine.
HTTP_ROLES = {
    "exchange": Role((f"{_SERVER}.run_asgi",), ("cycle:self",)),
    "respond": Role((f"{_SERVER}.send",), ("cycle:self", "message")),
}

# What is asked for at paths that end so: OpenAI's names, Anthropic's, and those of the engines themselves.
_OPERATIONS = {
    "chat": ("/chat/completions", "/messages", "/responses", "/chat"),
    "embeddings": ("/embeddings", "/embed", "/encode", "/pooling"),
    "text_completion": ("/completions", "/generate"),
}

# The id that an answer begins with, as OpenAI's and Anthropic's do, streamed and whole.
_RESPONSE_ID = re.compile(
    rb'\A(?:event: \w+\n)?(?:data: )?\{(?:"type":\s?"\w+",\s?"message":\s?\{)?"id":\s?"([\w.-]{1,200})"'
)
_FIRST_BYTES = 400


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
_exchange: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar(
    "sgl_aspects_exchange", default=None
)
current_exchange: Callable[[], Exchange | None] = _exchange.get


class ExchangeObserver:
    """Spans of requests that are refused; for all others what it notes belongs to the request's span.

    ``engines``: those whose requests come by HTTP. A refused request belongs to the one that is loaded.
    """

    def __init__(self, recorder: Recorder, engines: Sequence[Engine], options: TraceOptions) -> None:
        self._recorder = recorder
        self._engines = engines
        self._options = options
        self._write_request = recorder.spans(REQUEST)
        self._cycle = HTTP_ROLES["exchange"].reader("cycle")
        self._message = HTTP_ROLES["respond"].reader("message")

    def observations(self) -> list[Observation]:
        return [
            Observation("exchange", self._exchange_enter, self._exchange_exit),
            Observation("respond", self._respond_enter),
        ]

    def _exchange_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Exchange, Any]:
        cycle = self._cycle(args, kwargs, None)
        exchange = Exchange(cycle.scope, time_ns() - _unread_ns(cycle.transport))
        _exchange.set(exchange)
        return exchange, cycle

    def _exchange_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        _exchange.set(None)
        exchange, cycle = token
        exchange.is_whole = cycle.response_complete and not cycle.disconnected
        for end in exchange.at_end:
            end()
        if exchange.status >= 400 and not exchange.is_taken and self._recorder.level:
            self._refused(exchange)

    def _respond_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        exchange = _exchange.get()
        if exchange is None:
            return
        message = self._message(args, kwargs, None)
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            return
        if not exchange.first_ns and message.get("body"):
            exchange.first_ns = time_ns()
            found = _RESPONSE_ID.search(message["body"][:_FIRST_BYTES])
            if found is not None:
                exchange.response_id = found[1].decode()

    def _refused(self, exchange: Exchange) -> None:
        operation, recorder = operation_of(exchange.path), self._recorder
        engine = next((engine for engine in self._engines if _is_loaded(engine)), None)
        if operation is None or engine is None:
            return
        headers = exchange.headers if self._options.takes_context else None
        origin = context.of_request(headers, recorder.sample, self._options.asks_parent)
        attributes: dict[str, AttributeValue] = {
            OPERATION: operation,
            PROVIDER: engine.provider_name,
        }
        span_id, start_ns, status = recorder.new_id(), exchange.start_ns, exchange.status
        recorder.write(RequestBegin(span_id, "", start_ns, *origin, operation, attributes))
        values = [None] * (len(REQUEST.attributes) - 1)
        self._write_request(span_id, span_id, 0, start_ns, time_ns(), [*values, status], str(status))


def _is_loaded(engine: Engine) -> bool:
    """Whether the engine serves requests in this process."""
    role = engine.roles.get("serve_request")
    modules = [] if role is None else [target.partition(":")[0].split(".*")[0] for target in role.targets]
    return any(module in sys.modules for module in modules)


# In Linux's `struct tcp_info`: milliseconds since data last came, told in the kernel's ticks (1 to 10 ms).
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_LAST_DATA_RECEIVED = struct.Struct("52xI")


def _unread_ns(transport: Any) -> int:
    """How long ago the latest data of a connection came; 0 where the system does not tell."""
    connection = transport.get_extra_info("socket") if transport is not None else None
    if _TCP_INFO is None or connection is None:
        return 0
    try:
        told = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LAST_DATA_RECEIVED.size)
    except OSError:  # no TCP
        return 0
    return (
        int(_LAST_DATA_RECEIVED.unpack(told)[0]) * 1_000_000 if len(told) == _LAST_DATA_RECEIVED.size else 0
    )
