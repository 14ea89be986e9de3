"""Level 1, the caller's side of an engine.

Most answer many requests in one call and each by a generator (``serve_request``) that lives until the answer
is complete, the request fails, or the client is gone: so every request ends in any case. One that is streamed
over HTTP ends with the generator, after its last part; others end with their last output, since callers need
not exhaust the generator. In other engines functions begin and end each request.

Some engines tokenize before there is a request, and give a request its id late: earlier work is kept for the
request. Outputs report the total of an answer so far, or what is new of it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from time import monotonic_ns
from typing import Any

from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing import context
from sgl_aspects.tracing.content import LONGEST
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.lifecycle import Call, Trackers
from sgl_aspects.tracing.lifecycle.exchanges import (
    Exchange,
    Part,
    current_exchange,
    open_exchanges,
    operation_of,
)
from sgl_aspects.tracing.options import no_headers
from sgl_aspects.tracing.records import error_type
from sgl_aspects.tracing.schema import TEMPLATE, TOKENIZE, WAIT_FOR_ADAPTER


@dataclass(eq=False)
class _Serving:
    """A running generator. ``call`` is None until the request got its id."""

    observer: ServingObserver
    start_ns: int
    manager: Any
    http: Any
    exchange: Exchange | None
    outer: _Serving | None = None  # the submission of several requests that this one is of
    is_told: bool = False  # one of its own requests has the error
    call: Call | None = None
    tokenized: list[Part] = field(default_factory=list)


# Set while a generator runs, in its task and in those that it starts.
_serving: ContextVar[_Serving | None] = ContextVar("sgl_aspects_serving", default=None)


class ServingObserver:
    """Reports requests to the tracker of calls, by the generators that serve them."""

    def __init__(self, trackers: Trackers) -> None:
        engine, options, self._recorder = trackers.engine, trackers.options, trackers.recorder
        self._calls, self._content = trackers.calls, options.content
        call, reader = engine.call_reader, engine.reader
        self._reader_of_call = call
        self._enter_search = self._serve_enter("serve_search")
        self._searched = call("serve_search", "request")
        self._http = call("serve_request", "http")
        self._received = call("receive_request", "request")
        self._tokenized = call("tokenize_request", "request")
        self._sent = call("send_request", "tokenized")
        received, sent = engine.roles.get("receive_request"), engine.roles.get("send_request")
        #: Whether no function sends requests on, or the same that receives them.
        self._is_sent_at_once = sent is None or (received is not None and sent.targets == received.targets)
        self._all_sent = call("send_requests", "tokenized")
        self._got = call("receive_outputs", "outputs")
        #: Whether the role's function takes the outputs as an argument; otherwise it returns them.
        self._outputs_are_passed = engine.position("receive_outputs", "outputs") < sys.maxsize
        self._outputs_manager = call("receive_outputs", "manager")
        self._aborted = call("receive_abort", "message")
        self._all_aborted = call("receive_abort", "aborted")
        self._begun = {role: call(role, "request") for role in ("begin_request", "begin_stream")}
        self._rids = reader("request.rids")
        self._awaiting, self._adapter = call("await_adapter", "request"), reader("request.model")
        templates = ("apply_template", "render_messages", "render_template")
        self._renders, self._scope = {role: call(role, "http") for role in templates}, reader("http.scope")
        #: Uses of a chat template under another HTTP server than uvicorn, which gives no exchange.
        self._templated: weakref.WeakKeyDictionary[Any, list[Part]] = weakref.WeakKeyDictionary()
        self._is_probe = reader("request.is_probe")
        self._is_single = reader("request.is_single")
        self._received_ns = reader("request.received_ns")
        self._answer_count = reader("request.answer_count")
        self._answer_rids = reader("request.answer_rids")
        self._samples = reader("request.choice_count")
        self._streams = reader("request.stream")
        self._ends_with_exchange = reader("request.ends_with_exchange")
        self._http_headers = reader("http.headers") if options.takes_context else no_headers
        self._path = reader("http.path")
        self._sent_rid = reader("tokenized.rid")
        self._token_count = reader("tokenized.count")
        self._take = self._take_new if engine.has("outputs.new") else self._take_whole
        self._each_new = reader("outputs.new")
        self._each_output = reader("outputs.each")
        self._piece = reader("outputs.text")
        self._reason = reader("outputs.reason")
        self._reason_text, self._problem = reader("reason.text"), reader("reason.problem")
        self._status, self._error_status = reader("reason.status"), reader("error.status")
        self._aborted_rid, self._abort_reason = reader("message.rid"), reader("message.reason")

    def observations(self) -> list[Observation]:
        return [
            Observation("serve_request", self._serve_enter("serve_request"), self._serve_exit),
            Observation("serve_pooling", self._serve_enter("serve_pooling"), self._serve_exit),
            Observation("submit_requests", self._serve_enter("submit_requests"), self._serve_exit),
            Observation("serve_search", self._search_enter, self._serve_exit),
            Observation("submit_request", self._serve_enter("submit_request"), self._submit_exit),
            Observation("receive_request", lambda args, kwargs: (args, kwargs), self._receive_exit),
            *(Observation(role, self._begin_enter(role), self._begin_exit) for role in self._begun),
            Observation("await_adapter", self._adapter_enter, self._adapter_exit),
            *(Observation(role, self._template_enter(role), self._template_exit) for role in self._renders),
            Observation("tokenize_prompt", self._prompt_enter, self._tokenize_exit),
            Observation("tokenize_request", self._tokenize_enter, self._tokenize_exit),
            Observation("send_request", self._send_enter, self._send_exit),
            Observation("send_requests", self._send_all_enter),
            Observation("receive_outputs", self._outputs_enter, self._outputs_exit),
            Observation("parse_output", self._parse_enter, self._parse_exit),
            Observation("receive_abort", self._abort_enter, self._abort_exit),
        ]

    # -- the life of a request ------------------------------------------------------------------------------

    def _serve_enter(self, role: str) -> Callable[[tuple[Any, ...], dict[str, Any]], _Serving | None]:
        manager = self._reader_of_call(role, "manager")

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Serving | None:
            outer = _serving.get()
            if outer is not None and outer.call is not None and outer.call.searched:
                return None  # one of the requests by which that one is answered
            http, exchange = self._http(args, kwargs), current_exchange.get()
            serving = _Serving(self, monotonic_ns(), manager(args, kwargs), http, exchange)
            serving.outer = outer if role == "submit_request" else None
            _serving.set(serving)
            return serving

        return enter

    def _search_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Serving | None:
        serving = self._enter_search(args, kwargs)
        if serving is not None and self._recorder.level:
            request = self._searched(args, kwargs)
            call = serving.call = self._begin(serving, request)
            call.is_group, call.searched = True, self._answer_count(request)
            call.ends_with_output = False
        return serving

    def _submit_exit(self, serving: _Serving | None, result: Any, error: BaseException | None) -> None:
        if serving is None:  # of a search
            outer = _serving.get()
            if outer is not None and outer.call is not None and outer.call.answers:
                self._calls.sent(outer.call.answers[-1])
            return
        _serving.set(serving.outer)
        if serving.outer is not None:
            serving.outer.is_told = error is not None
        if (call := serving.call) is None:
            self._refuse(serving, error)
            return
        for each in call.answers or [call]:
            self._calls.sent(each)
        if error is not None:
            self._calls.leave(call, error_type(error), False)

    def _serve_exit(self, serving: _Serving | None, result: Any, error: BaseException | None) -> None:
        if serving is None:
            return
        if _serving.get() is serving:
            _serving.set(None)
        if serving.call is not None:
            # A caller that needs one answer takes it and closes the generator: a normal end.
            is_closed = isinstance(error, GeneratorExit)
            if error is not None and serving.http is not None and serving.exchange is None:
                serving.call.status = self._error_status(error)  # over HTTP/2 or gRPC
            self._calls.leave(serving.call, "cancelled" if is_closed else error_type(error), is_closed)
        else:
            self._refuse(serving, error)

    def _refuse(self, serving: _Serving, error: BaseException | None) -> None:
        """Record what was rejected before it was a request, unless it came by an observed HTTP exchange."""
        if isinstance(error, Exception) and serving.exchange is None and not serving.is_told:
            http = serving.http
            exchange = Exchange({}, serving.start_ns, status=(http and self._error_status(error)) or 0)
            operation, headers = operation_of(self._path(http) or ""), self._http_headers(http)
            self._calls.refuse(exchange, operation, headers, error_type(error))

    def _receive_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        self._receive(self._received(*token, result), error)

    def _receive(self, request: Any, error: BaseException | None) -> None:
        serving = _serving.get()
        if request is None or serving is None or serving.observer is not self:
            return
        if self._is_probe(request) or not self._recorder.level:
            return
        rids, calls = self._rids(request), self._calls
        if serving.call is not None:
            # n > 1: the prompt once, to prefill the cache, and each answer, come one by one.
            calls.begin_answers(serving.call, rids)
            return
        call = serving.call = self._begin(serving, request)
        answers = self._answer_rids(request)
        if error is not None:
            calls.fail(call, error_type(error))
        elif answers:
            calls.begin_answers(call, answers)
        else:
            call.rids.update(rids)
            calls.live.update(dict.fromkeys(rids, call))
        if self._is_sent_at_once:
            for each in call.answers or [call]:
                calls.sent(each)

    def _open(self, serving: _Serving, request: Any, origin: TraceContext | None = None) -> Call:
        """Open a request; the first of an HTTP exchange began with it."""
        exchange, http = serving.exchange, serving.http
        if exchange is not None and not exchange.is_taken:
            exchange.is_taken, start_ns = True, exchange.start_ns
        else:  # not over HTTP, or one of several requests of an HTTP request
            if exchange is not None:
                exchange.is_shared = True
            start_ns = self._received_ns(request) or serving.start_ns
        headers = self._http_headers(http or exchange)
        path = self._path(http) if http is not None else exchange.path if exchange is not None else ""
        operation = operation_of(path or "") or ("chat" if self._templates(serving) else None)
        return self._calls.begin(
            request, serving.manager, start_ns, headers=headers, operation=operation, origin=origin
        )

    def _begin(self, serving: _Serving, request: Any) -> Call:
        exchange = serving.exchange
        own = exchange if exchange is not None and not exchange.is_taken else None
        call = self._open(serving, request)
        call.exchange, call.streams = own, bool(self._streams(request))
        call.ends_with_exchange = bool(self._ends_with_exchange(request))
        call.ends_with_output = not call.streams or own is None or call.ends_with_exchange
        call.is_group = not self._is_single(request)
        if call.is_group:
            call.answers_left, call.samples = self._answer_count(request), self._samples(request) or 1
        # The first remaining request of the exchange.
        tokenized = serving.tokenized or (exchange.tokenized if exchange is not None else [])
        if tokenized:
            self._calls.add_part(call, TOKENIZE, tokenized.pop(0))
        if templated := self._templates(serving):
            self._calls.add_part(call, TEMPLATE, templated.pop(0))
        return call

    def _templates(self, serving: _Serving) -> list[Part]:
        if serving.exchange is not None:
            return serving.exchange.templated
        return self._templated.get(serving.http, []) if serving.http is not None else []

    def _begin_enter(self, role: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        read = self._begun[role]

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            request = read(args, kwargs, None)
            self._receive(request, None)
            return request

        return enter

    def _begin_exit(self, request: Any, result: Any, error: BaseException | None) -> None:
        """Note the result: the answer, or the object that collects it."""
        call = self._calls.live.get(self._rids(request)[0])
        if call is not None and error is None:
            call.latest = request, result
            if not call.ends_with_exchange:
                del self._calls.live[call.rid]
                self._calls.end(call, self._reason(call.latest) or "unknown")

    # -- on its way to the scheduler ------------------------------------------------------------------------

    def _adapter_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = self._awaiting(args, kwargs)
        adapter = self._adapter(request)
        call = self._calls.live.get(self._rids(request)[0]) if adapter else None
        return None if call is None else (call, adapter, monotonic_ns())

    def _adapter_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is not None:
            call, adapter, start_ns = token
            part = start_ns, monotonic_ns(), (adapter,), error_type(error)
            self._calls.add_part(call, WAIT_FOR_ADAPTER, part)

    def _template_enter(self, role: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        read, is_outer = self._renders[role], role == "apply_template"

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            http = read(args, kwargs)
            exchange = current_exchange.get() or open_exchanges.get(id(self._scope(http)))
            if not self._recorder.level or (exchange is None and http is None):
                return None
            if exchange is None:
                return None, self._templated.setdefault(http, []), monotonic_ns()
            within, exchange.is_templating = exchange.is_templating, True
            return (exchange, exchange.templated, monotonic_ns()) if is_outer or not within else None

        return enter

    def _template_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is not None:
            exchange, templated, start_ns = token
            templated.append((start_ns, monotonic_ns(), (), error_type(error)))
            if exchange is not None:
                exchange.is_templating = False

    def _prompt_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = _serving.get() or current_exchange.get()
        return (monotonic_ns(), place) if place is not None and self._recorder.level else None

    def _tokenize_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = self._tokenized(args, kwargs)
        if request is None:  # its request is known
            serving = _serving.get()
            return (monotonic_ns(), serving) if serving is not None and serving.observer is self else None
        call = self._calls.live.get(self._rids(request)[0])
        return None if call is None else self._calls.enter_tokenize(call)

    def _tokenize_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return
        count, problem = None if error is not None else self._token_count(result), error_type(error)
        if len(token) == 2:  # its request does not exist yet
            start_ns, place = token
            place.tokenized.append((start_ns, monotonic_ns(), (count,), problem))
        else:
            self._calls.tokenized(token, count, problem)

    def _send_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._calls.live.get(self._sent_rid(self._sent(args, kwargs)))
        if call is None:
            return None
        self._calls.sent(call)
        return self._calls.enter(call)

    def _send_exit(self, opened: Any, result: Any, error: BaseException | None) -> None:
        if opened is not None:
            context.leave(opened)

    def _send_all_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tokenized in self._all_sent(args, kwargs):
            call = self._calls.live.get(self._sent_rid(tokenized))
            if call is not None:
                self._calls.sent(call)

    # -- and back -------------------------------------------------------------------------------------------

    def _outputs_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._calls.came_late:
            self._calls.begin_attached(self._outputs_manager(args, kwargs))
        if not self._outputs_are_passed:
            return args, kwargs
        # At the end of the call it would be too late: SGLang wakes callers, sixteen at a time, within it.
        return self._take(self._got(args, kwargs))

    def _outputs_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is not None:
            self._take(self._got(*token, result))

    def _take_whole(self, outputs: Any) -> None:
        live = self._calls.live
        for index, (rid, reason) in enumerate(self._each_output(outputs)):
            call = live.get(rid)
            if call is None:
                continue
            call.latest = (outputs, index)
            if self._content is not None and len(call.text) < LONGEST:
                call.text += self._piece(call.latest) or ""
            if not call.first_ns:
                call.first_ns = monotonic_ns()
            if reason is not None:
                del live[rid]
                call.status = self._status(reason)
                self._calls.end(call, self._reason_text(reason) or "unknown", self._problem(reason) or "")

    def _take_new(self, outputs: Any) -> None:
        live = self._calls.live
        for rid, reason, new, prompt, cached in self._each_new(outputs):
            call = live.get(rid)
            if call is None:
                continue
            if call.tokens is None:
                call.first_ns = monotonic_ns()
                call.tokens = prompt, new, cached
            else:
                prompt, before, cached = call.tokens
                call.tokens = prompt, (before or 0) + new, cached
            if reason is not None:
                del live[rid]
                self._calls.end(call, reason)

    def _parse_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Exchange, int] | None:
        exchange = current_exchange.get()
        if exchange is None or exchange.is_parsing:  # by another parser, which calls this one
            return None
        exchange.is_parsing = True
        return exchange, monotonic_ns()

    def _parse_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is not None:
            exchange, start_ns = token
            exchange.is_parsing = False
            exchange.parsed_ns += monotonic_ns() - start_ns

    def _abort_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        message = self._aborted(args, kwargs)
        rid, reason = self._aborted_rid(message), self._abort_reason(message)
        self._calls.abort(rid, self._problem(reason) or "", self._status(reason))
        return args, kwargs

    def _abort_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        for rid in self._all_aborted(*token, result) or ():
            self._calls.abort(rid)


class CallingObserver(ServingObserver):
    """The same for an engine whose functions begin and end each request."""

    def __init__(self, trackers: Trackers) -> None:
        super().__init__(trackers)
        engine = trackers.engine
        call, reader = engine.call_reader, engine.reader
        self._detokenized, self._finished = call("detokenize", "state"), call("finish_request", "state")
        self._finish_reason = call("finish_request", "finish_reason")
        self._finish_error = call("finish_request", "error")
        self._group = reader("request.group")
        self._rid, self._text = reader("state.rid"), reader("state.text")
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
        serving = _Serving(self, monotonic_ns(), args[0], None, current_exchange.get())
        request = self._received(args, kwargs)
        # Several requests of one call share one trace, even without a caller's context.
        first = self._calls.live.get(self._group(request) or "")
        call = self._open(serving, request, first.origin if first else None)
        call.exchange = serving.exchange  # for its status, if the request fails
        call.ends_with_exchange = bool(self._streams(request))
        return call, self._calls.enter(call)

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
        error, reason = self._finish_error(args, kwargs), self._finish_reason(args, kwargs)
        if error is None:
            exchange, call.exchange = call.exchange, None  # the engine's own id and time of the first token
            if exchange is not None and call.ends_with_exchange and not exchange.is_shared:
                exchange.at_end.append(partial(calls.delivered, call, exchange, reason))
                if not exchange.is_over:  # read last: the server's thread may be ending it
                    return
        calls.end(call, reason, error_type(error))
