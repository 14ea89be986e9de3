"""Level 1, the HTTP server's side: when a request reached this machine, and when its answer began to leave.

The engine's own functions begin later, when the body is read and checked, and hand over an output before
it is formatted. And a busy event loop reads a request long after it came: 32 requests at once were read up to
100 ms late, which their clients saw as time to first token. The kernel knows when they came.

Known for uvicorn; under another server a request has no exchange, and the engine's times stand.
"""

from __future__ import annotations

import contextvars
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from time import time_ns
from typing import Any

from sgl_aspects.engines.base import Engine
from sgl_aspects.tracing.aspects.observer import Observation, nothing


@dataclass(eq=False)
class Exchange:
    """One HTTP request and its response, in nanoseconds since the epoch; 0: not yet.

    ``is_taken``: it is an engine's request. Further ones in the same exchange have times of their own.
    """

    start_ns: int
    first_ns: int = 0
    is_taken: bool = False


# Set in the task that serves an HTTP request, and so in those that it starts.
_exchange: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar(
    "sgl_aspects_exchange", default=None
)
current_exchange: Callable[[], Exchange | None] = _exchange.get


class ExchangeAspect:
    """No spans: what it notes belongs to the request's span."""

    def __init__(self, engine: Engine) -> None:
        self._transport = engine.reader("cycle.transport")
        self._cycle = engine.call_reader("exchange", "cycle")
        self._message = engine.call_reader("respond", "message")
        self._has_content = engine.reader("message.has_content")

    def observations(self) -> list[Observation]:
        return [
            Observation("exchange", self._exchange_enter, self._exchange_exit),
            Observation("respond", self._respond_enter, nothing),
        ]

    def _exchange_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _exchange.set(Exchange(time_ns() - _unread_ns(self._transport(self._cycle(args, kwargs)))))

    def _exchange_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        _exchange.set(None)

    def _respond_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        exchange = _exchange.get()
        if exchange is not None and not exchange.first_ns and self._has_content(self._message(args, kwargs)):
            exchange.first_ns = time_ns()


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
