"""Level 1, the HTTP server's side: when a request reached this machine, and when its answer began to leave.

The engine's own functions begin later, when the body is read and checked, and return an output before it is
formatted. And a busy event loop reads a request long after it came: 32 requests at once were read up to 100
ms late, which their clients saw as time to first token. The kernel has the arrival time.

A request rejected before it reaches the engine (an invalid field, an unknown model) has only this side: a
span that ends with the status of the response. So has one whose caller hung up before: an abort.

Works with uvicorn, whatever engine it serves, and with a gRPC server whose functions an engine's room names;
under another server a request has no exchange, and the engine's times are used.
"""

from __future__ import annotations

import re
import socket
import struct
import sys
from collections.abc import Sequence
from time import monotonic_ns
from typing import Any

from sgl_aspects.engines.base import Engine, Role
from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.lifecycle.exchanges import Exchange, current_exchange, open_exchanges, operation_of
from sgl_aspects.tracing.options import TraceOptions

_SERVER = "uvicorn.protocols.http.*_impl:RequestResponseCycle"
#: The functions of the HTTP server; they belong to no engine.
HTTP_ROLES = {
    "exchange": Role((f"{_SERVER}.run_asgi",), ("cycle:self",)),
    "respond": Role((f"{_SERVER}.send",), ("cycle:self", "message")),
    # Called only where the buffers of the connection are full.
    "await_caller": Role(("uvicorn.protocols.http.flow_control:FlowControl.drain",)),
}

# The id at the start of an answer, in OpenAI's and Anthropic's forms, streamed or not.
_RESPONSE_ID = re.compile(
    rb'\A(?:event: [\w.]+\r?\n)?(?:data: )?\{(?:[^{}]*"(?:message|response)":\s?\{)?[^{}]*?'
    rb'"id":\s?"([\w.-]{1,200})"'
)
# Events of a streamed answer before any part of it.
_PREAMBLE = re.compile(
    rb"(?:event: (?:response\.(?:created|queued|in_progress)|message_start|ping)\r?\n"
    rb"data: [^\n]*(?:\r?\n)+)+"
)
_FIRST_BYTES = 400
# A refusal instead of the first part of a streamed answer, whose own status is sent already.
_REFUSAL = re.compile(rb'\A(?:event: error\r?\n)?data: \{"error":\s?\{.*"code":\s?(4\d\d)\b')


class ExchangeObserver:
    """Records the begin and end of exchanges for the requests in them, and rejected requests.

    ``engines``: the trackers of those whose requests may come by HTTP. A rejected request belongs to the
    first that is loaded.
    """

    def __init__(self, engines: Sequence[Trackers], options: TraceOptions) -> None:
        self._engines = engines
        self._takes_context = options.takes_context
        self._cycle = HTTP_ROLES["exchange"].reader("cycle")
        self._message = HTTP_ROLES["respond"].reader("message")

    def observations(self) -> list[Observation]:
        return [
            Observation("exchange", self._exchange_enter, self._exchange_exit),
            Observation("respond", self._respond_enter, self._respond_exit),
            Observation("await_caller", self._unread_enter, self._unread_exit),
        ]

    def _exchange_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Exchange, Any]:
        cycle = self._cycle(args, kwargs, None)
        start_ns = monotonic_ns() - _unread_ns(cycle.transport)
        exchange = Exchange(cycle.scope, start_ns, is_gone=lambda: cycle.disconnected)
        current_exchange.set(exchange)
        open_exchanges[id(exchange.scope)] = exchange
        return exchange, cycle

    def _exchange_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        current_exchange.set(None)
        exchange, cycle = token
        open_exchanges.pop(id(exchange.scope), None)
        if not exchange.is_over:
            self._end(exchange, cycle.response_complete and not cycle.disconnected)

    def _end(self, exchange: Exchange, is_whole: bool) -> None:
        exchange.is_over, exchange.is_whole = True, is_whole
        for end in exchange.at_end:
            end()
        is_refused, is_left = exchange.status >= 400, not (is_whole or exchange.status)
        if (is_refused or is_left) and not exchange.is_taken:
            self._record_untaken(exchange)

    def _respond_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        exchange = current_exchange.get()
        if exchange is None:
            return None
        message, cycle = self._message(args, kwargs, None), self._cycle(args, kwargs, None)
        if message["type"] == "http.response.start":
            exchange.status = 0 if cycle.disconnected else message["status"]  # 0: nobody gets it
            return None
        ending = None if message.get("more_body") else (exchange, cycle)
        body = message.get("body")
        if exchange.first_ns or not body:
            return ending
        if not exchange.response_id and (found := _RESPONSE_ID.search(body[:_FIRST_BYTES])) is not None:
            exchange.response_id = found[1].decode()
        if (refusal := _REFUSAL.match(body)) is not None:
            exchange.status = int(refusal[1])
        if _PREAMBLE.fullmatch(body) is None:
            exchange.first_ns = monotonic_ns()
        return ending

    def _respond_exit(self, ending: Any, result: Any, error: BaseException | None) -> None:
        """End with the last part: what the application does after its response is none of the request's."""
        if ending is not None and ending[1].response_complete:
            self._end(ending[0], not ending[1].disconnected)

    def _unread_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Exchange | None, int]:
        return current_exchange.get(), monotonic_ns()

    def _unread_exit(
        self, token: tuple[Exchange | None, int], result: Any, error: BaseException | None
    ) -> None:
        (exchange, start_ns), end_ns = token, monotonic_ns()
        if exchange is not None:
            first_ns, _, total_ns = exchange.unread or (start_ns, 0, 0)
            exchange.unread = [first_ns, end_ns, total_ns + end_ns - start_ns]

    def _record_untaken(self, exchange: Exchange) -> None:
        operation = operation_of(exchange.path)
        trackers = next((one for one in self._engines if _is_loaded(one.engine)), None)
        if operation is not None and trackers is not None:
            headers = exchange.headers if self._takes_context else None
            trackers.calls.refuse(exchange, operation, headers)


_LINES = "answer_line", "refuse_line"


class RpcObserver(ExchangeObserver):
    """Likewise for the calls of an engine's gRPC server."""

    def __init__(self, trackers: Trackers) -> None:
        super().__init__([trackers], trackers.options)
        self._read = trackers.engine.call_reader

    def observations(self) -> list[Observation]:
        roles = "answer_rpc", "answer_embedding_rpc", *_LINES
        return [self._observation(role) for role in roles]

    def _observation(self, role: str) -> Observation:
        scope, status = self._read(role, "scope"), self._read(role, "status")

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Exchange, Any, Any]:
            exchange = Exchange(scope(args, kwargs), monotonic_ns())
            current_exchange.set(exchange)
            return exchange, args, kwargs

        def leave(token: tuple[Exchange, Any, Any], result: Any, error: BaseException | None) -> None:
            current_exchange.set(None)
            exchange, args, kwargs = token
            if isinstance(error, Exception) or role in _LINES:  # its caller is not gone
                exchange.status = status(args, kwargs, result)
            self._end(exchange, error is None)

        return Observation(role, enter, leave)


def _is_loaded(engine: Engine) -> bool:
    """Return whether the engine serves requests in this process."""
    role = engine.roles.get("serve_request") or engine.roles.get("receive_request")
    modules = [] if role is None else [target.partition(":")[0].split(".*")[0] for target in role.targets]
    return any(module in sys.modules for module in modules)


# In Linux's `struct tcp_info`: milliseconds since data last came, in the kernel's ticks (1 to 10 ms).
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_LAST_DATA_RECEIVED = struct.Struct("52xI")


def _unread_ns(transport: Any) -> int:
    """Return the time since the latest data of a connection came; 0 if the system does not report it."""
    connection = transport.get_extra_info("socket") if transport is not None else None
    if _TCP_INFO is None or connection is None:
        return 0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _LAST_DATA_RECEIVED.size)
    except OSError:  # not TCP
        return 0
    return (
        int(_LAST_DATA_RECEIVED.unpack(info)[0]) * 1_000_000 if len(info) == _LAST_DATA_RECEIVED.size else 0
    )
