"""Level 1, the caller's side: one span for each request, with tokenize and detokenize below it."""

from __future__ import annotations

from dataclasses import dataclass
from time import time_ns
from typing import Any

from sgl_aspects.tracing import context
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.observation import Observation, error_type
from sgl_aspects.tracing.options import no_headers
from sgl_aspects.tracing.records import AttributeValue, RequestBegin, RequestSent, SpanType
from sgl_aspects.tracing.schema import (
    ATTACHED_FLAG,
    DETOKENIZE,
    INPUT_MESSAGES,
    OPERATION,
    PROVIDER,
    REQUEST,
    REQUEST_ATTRIBUTES,
    REQUEST_ID,
    REQUEST_MODEL,
    REQUEST_PREFIX,
    TOKENIZE,
)


@dataclass
class _Live:
    """A request between its beginning and its end. Times in nanoseconds."""

    span_id: int
    start_ns: int
    model: str
    origin: context.TraceContext
    detokenize_id: int = 0
    detokenize_start: int = 0
    detokenize_end: int = 0
    detokenize_busy: int = 0
    detokenize_calls: int = 0
    is_attached: bool = False


class CallingObserver:
    """Spans ``chat {model}`` or ``text_completion {model}``, from its receipt to its finish."""

    def __init__(self, trackers: Trackers) -> None:
        engine, recorder, options = trackers.engine, trackers.recorder, trackers.options
        self._recorder = recorder
        self._options = options
        self._content = options.content
        self._write_request = recorder.spans(REQUEST)
        self._write_tokenize = recorder.spans(TOKENIZE)
        self._write_detokenize = recorder.spans(DETOKENIZE)
        self._provider = engine.provider_name
        self._live: dict[str, _Live] = {}
        call, reader = engine.call_reader, engine.reader
        self._received = call("receive_request", "request")
        self._tokenized = call("tokenize_request", "state")
        self._sent = call("send_request", "state")
        self._detokenized = call("detokenize", "state")
        self._finished = call("finish_request", "state")
        self._finish_reason = call("finish_request", "finish_reason")
        self._finish_error = call("finish_request", "error")
        self._headers = reader("request.headers") if options.takes_context else no_headers
        self._operation = reader("request.operation")
        self._request_rid = reader("request.rid")
        self._attributes = [(REQUEST_PREFIX + name, reader(f"request.{name}")) for name in REQUEST_ATTRIBUTES]
        self._group = reader("request.group")
        self._messages = reader("request.messages")
        self._text = reader("state.text")
        self._rid = reader("state.rid")
        self._engine_model = reader("manager.model")
        self._came_late = options.attached
        self._in_flight = reader("manager.in_flight")
        self._prompt_tokens = reader("state.prompt_tokens")
        self._cached_tokens = reader("state.cached_tokens")
        self._output_tokens = reader("state.output_tokens")
        self._first_token_ns = reader("state.first_token_time_ns")

    def observations(self) -> list[Observation]:
        return [
            Observation("receive_request", self._receive_enter, self._receive_exit),
            Observation("tokenize_request", self._tokenize_enter, self._tokenize_exit),
            Observation("send_request", self._send_enter, self._send_exit),
            Observation("detokenize", self._detokenize_enter, self._detokenize_exit),
            Observation("finish_request", self._finish_enter),
        ]

    def _receive_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder = self._recorder
        if not recorder.level:
            return None
        start_ns, manager, request = time_ns(), args[0], self._received(args, kwargs)
        span_id = recorder.new_id()
        model = str(self._engine_model(manager) or "unknown")
        rid = str(self._request_rid(request) or "")
        attributes = self._request_attributes(request, rid, model)
        if self._content is not None:
            prompt = self._content.input(self._messages(request))
            if prompt is not None:
                attributes[INPUT_MESSAGES] = prompt
        # Several requests of one call are one trace, even where the call brought none along.
        first = self._live.get(self._group(request) or "")
        origin = (
            first.origin
            if first
            else context.of_request(self._headers(request), recorder.sample, self._options.asks_parent)
        )
        name = f"{attributes[OPERATION]} {model}"
        recorder.write(RequestBegin(span_id, rid, start_ns, *origin, name, attributes))
        live = _Live(span_id, start_ns, model, origin)
        return rid, live, self._open(REQUEST, live, span_id, start_ns)

    def _request_attributes(self, request: Any, rid: str, model: str) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            OPERATION: str(self._operation(request) or "text_completion"),
            PROVIDER: self._provider,
            REQUEST_MODEL: model,
            REQUEST_ID: rid,
        }
        for name, read in self._attributes:
            value = read(request)
            if value is not None and value != ():
                attributes[name] = value
        return attributes

    def _receive_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return  # switched off
        rid, live, opened = token
        context.close_span(opened)
        if error is None:
            self._live[rid] = live
        else:
            root = live.span_id
            self._write_request(root, root, 0, live.start_ns, time_ns(), (), error_type(error))

    def _tokenize_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        live = self._live.get(self._rid(self._tokenized(args, kwargs)))
        if live is None:
            return None
        span_id, start_ns = self._recorder.new_id(), time_ns()
        return live.span_id, span_id, start_ns, self._open(TOKENIZE, live, span_id, start_ns)

    def _tokenize_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return
        root, span_id, start_ns, opened = token
        context.close_span(opened)
        count = len(result) if isinstance(result, list) else None
        self._write_tokenize(span_id, root, root, start_ns, time_ns(), (count,), error_type(error))

    def _send_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        live = self._live.get(self._rid(self._sent(args, kwargs)))
        if live is None:
            return None
        self._recorder.write(RequestSent(live.span_id))
        return self._open(REQUEST, live, live.span_id, live.start_ns)

    def _send_exit(self, opened: Any, result: Any, error: BaseException | None) -> None:
        if opened is not None:
            context.close_span(opened)

    def _begin_attached(self, manager: Any) -> None:
        """What was under way when we came: from its first event on, under the context that it came with."""
        self._came_late, now = False, time_ns()
        for rid, request in dict(self._in_flight(manager) or {}).items():
            if rid not in self._live:
                span_id, model = self._recorder.new_id(), str(self._engine_model(manager) or "unknown")
                origin = context.of_request(
                    self._headers(request), self._recorder.sample, self._options.asks_parent
                )
                attributes = {**self._request_attributes(request, rid, model), ATTACHED_FLAG: True}
                name = f"{attributes[OPERATION]} {model}"
                self._recorder.write(RequestBegin(span_id, rid, now, *origin, name, attributes))
                self._recorder.write(RequestSent(span_id))
                self._live[rid] = _Live(span_id, now, model, origin, is_attached=True)

    def _detokenize_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._came_late:
            self._begin_attached(args[0])
        live = self._live.get(self._rid(self._detokenized(args, kwargs)))
        if live is None:
            return None
        start_ns = time_ns()
        if not live.detokenize_calls:
            live.detokenize_id, live.detokenize_start = self._recorder.new_id(), start_ns
        return live, start_ns, self._open(DETOKENIZE, live, live.detokenize_id, live.detokenize_start)

    def _detokenize_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return
        live, start_ns, opened = token
        live.detokenize_end = time_ns()
        context.close_span(opened)
        live.detokenize_busy += live.detokenize_end - start_ns
        live.detokenize_calls += 1

    def _open(self, type: SpanType, live: _Live, span_id: int, start_ns: int) -> context.Opened:
        """The request itself or a child of it is current while the function runs."""
        root = live.span_id
        parent_id = 0 if span_id == root else root
        return self._recorder.begin(type, span_id, root, parent_id, start_ns, live.origin)

    def _finish_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # On entry: the call wakes the request's waiters, and they may end the process.
        if self._came_late:
            self._begin_attached(args[0])
        state = self._finished(args, kwargs)
        reason, cause = self._finish_reason(args, kwargs), self._finish_error(args, kwargs)
        live = self._live.pop(self._rid(state), None)
        if live is None:
            return
        root = live.span_id
        if live.detokenize_calls:
            busy = (live.detokenize_calls, live.detokenize_busy / 1e9)
            span_id, start_ns, end_ns = live.detokenize_id, live.detokenize_start, live.detokenize_end
            self._write_detokenize(span_id, root, root, start_ns, end_ns, busy)
        problem = error_type(cause)
        if not problem and reason in ("abort", "error"):
            problem = reason
        end_ns = time_ns()
        first_ns = self._first_token_ns(state)
        # Nothing is negative where the clock was set back meanwhile.
        to_first = (first_ns - live.start_ns) / 1e9 if first_ns and first_ns >= live.start_ns else None
        values: list[AttributeValue] = [
            self._rid(state),
            live.model,
            [reason] if reason else None,
            to_first,
            self._prompt_tokens(state),
            self._output_tokens(state),
            self._cached_tokens(state),
            to_first,
            max(0, end_ns - live.start_ns) / 1e9 if not live.is_attached else None,
            None if self._content is None else self._content.output(self._text(state), reason),
        ]
        self._write_request(root, root, 0, live.start_ns, end_ns, values, problem)
