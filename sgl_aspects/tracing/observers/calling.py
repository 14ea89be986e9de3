"""Level 1, the caller's side of an engine whose functions begin and end each request."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing import context
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.lifecycle.exchanges import current_exchange
from sgl_aspects.tracing.observers.serving import ServingObserver
from sgl_aspects.tracing.records import error_type


class CallingObserver(ServingObserver):
    """Reports requests to the tracker of calls, from receipt to finish; in between as other engines' are."""

    def __init__(self, trackers: Trackers) -> None:
        super().__init__(trackers)
        engine = trackers.engine
        call, reader = engine.call_reader, engine.reader
        self._detokenized = call("detokenize", "state")
        self._finished = call("finish_request", "state")
        self._finish_reason = call("finish_request", "finish_reason")
        self._finish_error = call("finish_request", "error")
        self._group = reader("request.group")
        self._rid = reader("state.rid")
        self._text = reader("state.text")
        self._tokens = engine.values_reader("state", ("prompt_tokens", "output_tokens", "cached_tokens"))
        self._first_token_ns = reader("state.first_token_time_ns")

    def observations(self) -> list[Observation]:
        return [
            Observation("receive_request", self._open_enter, self._open_exit),
            Observation("tokenize_request", self._tokenize_enter, self._tokenize_exit),
            Observation("send_request", self._send_enter, self._send_exit),
            Observation("detokenize", self._detokenize_enter, self._detokenize_exit),
            Observation("finish_request", self._finish_enter),
        ]

    def _open_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._recorder.level:
            return None
        start_ns, calls, request = monotonic_ns(), self._calls, self._received(args, kwargs)
        exchange = current_exchange.get()
        if exchange is not None:
            if not exchange.is_taken:  # the first of its requests came with it
                start_ns = exchange.start_ns
            exchange.is_taken = True  # an engine's request, so never a rejection by the server alone
        # Several requests of one call share one trace, even without a caller's context.
        first = calls.live.get(self._group(request) or "")
        call = calls.begin(request, args[0], start_ns, origin=first.origin if first else None)
        call.exchange = exchange  # for its status, if the request fails
        return call, calls.enter(call)

    def _open_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return  # level 0
        call, opened = token
        context.leave(opened)
        if error is None:
            self._calls.live[call.rid] = call
        else:
            self._calls.fail(call, error_type(error))

    def _detokenize_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._calls.came_late:
            self._calls.begin_attached(args[0])
        call = self._calls.live.get(self._rid(self._detokenized(args, kwargs)))
        return None if call is None else self._calls.enter_detokenize(call)

    def _detokenize_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is not None:
            self._calls.detokenized(token)

    def _finish_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # On entry: the call wakes the request's waiters, and they may end the process.
        calls, state = self._calls, self._finished(args, kwargs)
        if calls.came_late:
            calls.begin_attached(args[0])
        call = calls.live.pop(self._rid(state), None)
        if call is None:
            return
        call.tokens = (*self._tokens(state),)
        call.first_ns = self._first_token_ns(state) or 0
        call.text = self._text(state) or ""
        error = self._finish_error(args, kwargs)
        if error is None:
            call.exchange = None  # the engine's own id and time of the first token
        calls.end(call, self._finish_reason(args, kwargs), error_type(error))
