"""Level 1, the caller's side, for an engine that answers many requests in one call and each by a generator.

A request is served by a generator (``serve_request``) that lives until the answer is complete, the request
fails, or the client is gone: so every request ends, whatever happens. One that is streamed over HTTP ends
with the generator, when the server has its last part; others with their last output, for nobody has to
exhaust the generator. A request for several answers (a batch of prompts, or n > 1) is one span, with a child
span for each answer.

Some engines tokenize before there is a request, and give a request its id late: what was done before waits
for the request. Outputs say how much there is of an answer by now, or what is new of it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import time_ns
from typing import Any

from sgl_aspects.tracing import context
from sgl_aspects.tracing.content import LONGEST
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.exchanged import Exchange, current_exchange, operation_of
from sgl_aspects.tracing.observers.observation import Observation, error_type
from sgl_aspects.tracing.options import no_headers
from sgl_aspects.tracing.records import AttributeValue, RequestBegin, RequestSent
from sgl_aspects.tracing.schema import (
    ATTACHED_FLAG,
    BOOTSTRAP_ROOM,
    CHOICE_COUNT,
    HEADER_REQUEST_ID,
    INPUT_MESSAGES,
    OPERATION,
    PROVIDER,
    REQUEST,
    REQUEST_ATTRIBUTES,
    REQUEST_ID,
    REQUEST_MODEL,
    REQUEST_PREFIX,
    RESPONSE_MODEL,
    TOKENIZE,
)


@dataclass(eq=False)
class _Answer:
    """One span of a request: the request itself, or one of its several answers."""

    span_id: int
    rid: str
    start_ns: int
    serving: _Serving
    origin: TraceContext
    text: str = ""
    first_ns: int = 0
    #: The message with its latest output, and where in it that is.
    latest: tuple[Any, int] | None = None
    #: Prompt, output and cached tokens, of an engine whose outputs say what is new.
    tokens: tuple[int | None, int, int | None] | None = None
    #: Why it ended, once it has.
    reason: str | None = None
    is_recorded: bool = False
    #: Whether it was under way when we came.
    is_attached: bool = False


@dataclass(eq=False)
class _Serving:
    """A generator at work. ``root`` is None until the request got its id.

    Of a request for several answers: ``answers`` in the order in which they began, ``answers_left`` how many
    have not ended, ``samples`` of each prompt.
    """

    observer: ServingObserver
    start_ns: int
    manager: Any
    http: Any
    exchange: Exchange | None
    origin: TraceContext | None = None
    name: str = ""
    root: _Answer | None = None
    is_group: bool = False
    streams: bool = False
    ends_with_exchange: bool = False
    samples: int = 1
    answers_left: int = 0
    answers: list[_Answer] = field(default_factory=list)
    tokenized: list[tuple[int, int, int | None, str]] = field(default_factory=list)
    rids: set[str] = field(default_factory=set)

    @property
    def answers_of_the_caller(self) -> list[_Answer]:
        """Without those that only bring the prompts into the cache: one for each, before all samples."""
        prompts = len(self.answers) // (self.samples + 1) if self.samples > 1 else 0
        return self.answers[prompts:]

    @property
    def ends_with_generator(self) -> bool:
        return self.streams and self.exchange is not None and not self.ends_with_exchange


# Set while a generator runs: what it makes of one request it makes in its own task, or in tasks of its own.
_serving: contextvars.ContextVar[_Serving | None] = contextvars.ContextVar(
    "sgl_aspects_serving", default=None
)


class ServingObserver:
    """Spans ``chat {model}`` or ``text_completion {model}``, with ``tokenize`` below them."""

    def __init__(self, trackers: Trackers) -> None:
        engine, recorder, options = trackers.engine, trackers.recorder, trackers.options
        self._recorder = recorder
        self._options = options
        self._content = options.content
        self._messages = engine.reader("request.messages")
        self._piece = engine.reader("outputs.text")
        self._write_request = recorder.spans(REQUEST)
        self._write_tokenize = recorder.spans(TOKENIZE)
        self._provider = engine.provider_name
        self._live: dict[str, _Answer] = {}
        call, reader = engine.call_reader, engine.reader
        self._manager = call("serve_request", "manager")
        self._http = call("serve_request", "http")
        self._received = call("receive_request", "request")
        self._tokenized = call("tokenize_request", "request")
        self._sent = call("send_request", "tokenized")
        self._all_sent = call("send_requests", "tokenized")
        self._got = call("receive_outputs", "outputs")
        self._came_late = options.attached
        self._outputs_manager = call("receive_outputs", "manager")
        self._in_flight = reader("manager.in_flight")
        self._each_new = reader("outputs.new")
        self._gets_new = "outputs.new" in engine.attributes
        self._aborted = call("receive_abort", "message")
        self._all_aborted = call("receive_abort", "aborted")
        self._begun = {role: call(role, "request") for role in ("begin_request", "begin_stream")}
        self._rids = reader("request.rids")
        self._is_probe = reader("request.is_probe")
        self._is_single = reader("request.is_single")
        self._received_ns = reader("request.received_ns")
        self._answer_count = reader("request.answer_count")
        self._answer_rids = reader("request.answer_rids")
        self._streams = reader("request.stream")
        self._shared_key = reader("request.shared_key")
        self._is_first_server = reader("manager.is_first_server")
        self._headers = reader("request.headers") if options.takes_context else no_headers
        self._http_headers = reader("http.headers") if options.takes_context else no_headers
        self._path = reader("http.path")
        self._model = reader("manager.model")
        self._choice_count = reader("request.choice_count")
        self._attributes = [(REQUEST_PREFIX + name, reader(f"request.{name}")) for name in REQUEST_ATTRIBUTES]
        self._sent_rid = reader("tokenized.rid")
        self._token_count = reader("tokenized.count")
        self._each_output = reader("outputs.each")
        self._counts = reader("outputs.counts")
        self._reason = reader("outputs.reason")
        self._ends_with_exchange = reader("request.ends_with_exchange")
        self._reason_text = reader("reason.text")
        self._aborted_rid = reader("message.rid")

    def observations(self) -> list[Observation]:
        return [
            Observation("serve_request", self._serve_enter, self._serve_exit),
            Observation("receive_request", self._receive_enter, self._receive_exit),
            *(Observation(role, self._begin_enter(role), self._begin_exit) for role in self._begun),
            Observation("tokenize_prompt", self._prompt_enter, self._prompt_exit),
            Observation("tokenize_request", self._tokenize_enter, self._tokenize_exit),
            Observation("send_request", self._send_enter, self._send_exit),
            Observation("send_requests", self._send_all_enter),
            Observation("receive_outputs", self._outputs_enter, self._outputs_exit),
            Observation("receive_abort", self._abort_enter, self._abort_exit),
        ]

    # -- the life of a request ------------------------------------------------------------------------------

    def _serve_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Serving:
        http = self._http(args, kwargs)
        serving = _Serving(self, time_ns(), self._manager(args, kwargs), http, current_exchange())
        _serving.set(serving)
        return serving

    def _serve_exit(self, serving: _Serving, result: Any, error: BaseException | None) -> None:
        if _serving.get() is serving:
            _serving.set(None)
        # A caller that wants one answer takes it and closes the generator: a normal end.
        closed = isinstance(error, GeneratorExit)
        problem = "" if error is None else "cancelled" if closed else error_type(error)
        root = serving.root
        for rid in serving.rids:
            answer = self._live.pop(rid, None)
            if answer is not None and answer is not root:
                self._record(answer, problem or "unfinished")
        if root is None:
            return
        if serving.ends_with_exchange and not problem and serving.exchange is not None:
            serving.exchange.at_end.append(partial(self._record_streamed, root))
            return
        has_all = root.reason is not None or (serving.is_group and (closed or not serving.answers_left))
        if problem and not has_all and serving.exchange is not None and not serving.exchange.first_ns:
            # The response will say how it failed.
            serving.exchange.at_end.append(partial(self._record, root, problem))
        else:
            self._record(root, "" if has_all else problem)

    def _receive_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._received(args, kwargs)

    def _begin_enter(self, role: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
        read = self._begun[role]

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            request = read(args, kwargs, None)
            self._receive_exit(request, None, None)
            answer = self._live.get(self._rids(request)[0])
            if answer is not None:
                self._recorder.write(RequestSent(answer.span_id))
            return request

        return enter

    def _begin_exit(self, request: Any, result: Any, error: BaseException | None) -> None:
        """Of a function that answers the request, or gives what its answer grows in."""
        answer = self._live.get(self._rids(request)[0])
        if answer is not None and error is None:
            answer.latest = request, result
            if not answer.serving.ends_with_exchange:
                del self._live[answer.rid]
                self._end(answer, self._reason(answer.latest) or "unknown")

    def _record_streamed(self, answer: _Answer) -> None:
        """The response is complete, or its client is gone."""
        self._live.pop(answer.rid, None)
        exchange = answer.serving.exchange
        is_whole = exchange is not None and exchange.is_whole
        answer.reason = self._reason(answer.latest) if is_whole else "abort"
        self._record(answer)

    def _receive_exit(self, request: Any, result: Any, error: BaseException | None) -> None:
        serving = _serving.get()
        if (
            serving is None
            or serving.observer is not self
            or self._is_probe(request)
            or not self._recorder.level
        ):
            return
        rids = self._rids(request)
        if serving.root is not None:
            # n > 1: the prompt once, to have it in the cache, and each answer, come one by one.
            self._begin_answers(serving, rids, request)
            return
        samples = self._choice_count(request)
        serving.is_group = not self._is_single(request)
        serving.streams = bool(self._streams(request))
        serving.ends_with_exchange = bool(self._ends_with_exchange(request))
        if serving.is_group:
            serving.answers_left, serving.samples = self._answer_count(request), samples or 1
        exchange, http = serving.exchange, serving.http
        if exchange is not None and not exchange.is_taken:
            exchange.is_taken, start_ns = True, exchange.start_ns
        else:
            # Not over HTTP, or one of several that an HTTP request led to.
            serving.exchange, start_ns = None, self._received_ns(request) or serving.start_ns
        headers = self._headers(request) or self._http_headers(http or exchange)
        key = self._shared_key(request)
        shared = None if key is None else (key, bool(self._is_first_server(serving.manager)))
        serving.origin = context.of_request(headers, self._recorder.sample, self._options.asks_parent, shared)
        path = self._path(http) if http is not None else exchange.path if exchange is not None else ""
        operation = operation_of(path) or "text_completion"
        model = str(self._model(serving.manager) or "unknown")
        serving.name = f"{operation} {model}"
        attributes = self._request_attributes(request, operation, model, rids[0])
        if key is not None:
            attributes[BOOTSTRAP_ROOM] = key
        callers_id = (headers or {}).get("x-request-id")
        if callers_id:
            attributes[HEADER_REQUEST_ID] = [callers_id]
        if self._content is not None:
            prompt = self._content.input(self._messages(request))
            if prompt is not None:
                attributes[INPUT_MESSAGES] = prompt
        is_root_of_both = shared is not None and shared[1] and not serving.origin.parent_id
        span_id = context.span_id_of_shared(shared[0]) if shared is not None and is_root_of_both else 0
        root = serving.root = self._begin(serving, rids[0], start_ns, serving.origin, attributes, span_id)
        self._tell_tokenized(root, exchange)
        answers = self._answer_rids(request)
        if error is not None:
            self._record(root, error_type(error))
        elif answers:
            self._begin_answers(serving, answers, request)
        else:
            for rid in rids:
                self._live[rid] = root
                serving.rids.add(rid)

    def _begin_answers(self, serving: _Serving, rids: tuple[str, ...], request: Any) -> None:
        origin, root = serving.origin, serving.root
        if origin is None or root is None:
            return
        parent = TraceContext(origin.trace_id, root.span_id, origin.sampled, origin.state, False)
        now = time_ns()
        for rid in rids:
            attributes: dict[str, AttributeValue] = {REQUEST_ID: rid}
            answer = self._live[rid] = self._begin(serving, rid, now, parent, attributes)
            serving.answers.append(answer)
            serving.rids.add(rid)

    def _begin(
        self,
        serving: _Serving,
        rid: str,
        start_ns: int,
        origin: TraceContext,
        attributes: dict[str, AttributeValue],
        span_id: int = 0,
    ) -> _Answer:
        answer = _Answer(span_id or self._recorder.new_id(), rid, start_ns, serving, origin)
        self._recorder.write(RequestBegin(answer.span_id, rid, start_ns, *origin, serving.name, attributes))
        return answer

    def _request_attributes(
        self, request: Any, operation: str, model: str, rid: str
    ) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            OPERATION: operation,
            PROVIDER: self._provider,
            REQUEST_MODEL: model,
            RESPONSE_MODEL: model,
            REQUEST_ID: rid,
            CHOICE_COUNT: self._choice_count(request),
        }
        for name, read in self._attributes:
            value = read(request)
            if value is not None and value != ():
                attributes[name] = value
        return {name: value for name, value in attributes.items() if value is not None}

    def _end(self, answer: _Answer, reason: str) -> None:
        """The last output of an answer is here."""
        answer.reason = reason
        serving = answer.serving
        if answer is not serving.root:
            self._record(answer)
            serving.answers_left -= 1
            if serving.answers_left or serving.root is None:
                return
        if not serving.ends_with_generator and serving.root is not None:
            self._record(serving.root)

    def _record(self, answer: _Answer, problem: str = "") -> None:
        if answer.is_recorded:
            return
        answer.is_recorded = True
        end_ns, serving = time_ns(), answer.serving
        is_whole = answer is serving.root and serving.is_group
        latest = [answer] if not is_whole else serving.answers_of_the_caller
        counts = [
            one.tokens or self._counts(one.latest) for one in latest if one.tokens or one.latest is not None
        ]
        prompt, output, cached = map(_total, zip(*counts)) if counts else (None, None, None)
        if is_whole:  # a prompt counts once, however many samples there are of it
            prompt, cached = (total and total // serving.samples for total in (prompt, cached))
        reasons = [one.reason for one in latest if one.reason]
        # Where the answer comes in one piece, its first token is seen in the scheduler only.
        first_ns = min((one.first_ns for one in latest if one.first_ns), default=0) if serving.streams else 0
        if first_ns and answer is serving.root and serving.exchange is not None:
            first_ns = serving.exchange.first_ns or first_ns
        to_first = (first_ns - answer.start_ns) / 1e9 if first_ns and first_ns >= answer.start_ns else None
        if not problem and "abort" in reasons:
            problem = "abort"
        response_id = answer.rid
        if answer is serving.root and serving.exchange is not None:
            response_id = serving.exchange.response_id or answer.rid
        values: list[AttributeValue] = [
            response_id,
            None,
            reasons or None,
            to_first,
            prompt,
            output,
            cached,
            to_first,
            max(0, end_ns - answer.start_ns) / 1e9 if not answer.is_attached else None,
            None if self._content is None else self._content.output(answer.text, answer.reason or problem),
        ]
        if problem and serving.exchange is not None and serving.exchange.status >= 400:
            values.append(serving.exchange.status)
        span_id = answer.span_id
        self._write_request(span_id, span_id, 0, answer.start_ns, end_ns, values, problem)

    # -- on its way -----------------------------------------------------------------------------------------

    def _prompt_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tokenized before anything of a request is there but its exchange."""
        place = _serving.get() or current_exchange()
        return (time_ns(), place) if place is not None and self._recorder.level else None

    def _prompt_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is not None:
            self._tokenize_exit(token, result, error)

    def _tokenize_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        request = self._tokenized(args, kwargs)
        if request is None:  # what it will be a request of is known
            serving = _serving.get()
            return (time_ns(), serving) if serving is not None and serving.observer is self else None
        answer = self._live.get(self._rids(request)[0])
        if answer is None:
            return None
        recorder, root = self._recorder, answer.span_id
        span_id, start_ns = recorder.new_id(), time_ns()
        return root, span_id, start_ns, recorder.begin(TOKENIZE, span_id, root, root, start_ns, answer.origin)

    def _tokenize_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return
        count = None if error is not None else self._token_count(result)
        if len(token) == 2:  # for a request that is still to come
            start_ns, place = token
            place.tokenized.append((start_ns, time_ns(), count, error_type(error)))
            return
        root, span_id, start_ns, opened = token
        end_ns = time_ns()
        context.close_span(opened)
        self._write_tokenize(span_id, root, root, start_ns, end_ns, (count,), error_type(error))

    def _tell_tokenized(self, answer: _Answer, exchange: Exchange | None) -> None:
        """What was tokenized for this request: of those of one exchange, the first that is left."""
        place = answer.serving if answer.serving.tokenized else exchange
        if place is not None and place.tokenized:
            start_ns, end_ns, count, problem = place.tokenized.pop(0)
            root = answer.span_id
            self._write_tokenize(self._recorder.new_id(), root, root, start_ns, end_ns, (count,), problem)

    def _send_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = self._live.get(self._sent_rid(self._sent(args, kwargs)))
        if answer is None:
            return None
        root = answer.span_id
        self._recorder.write(RequestSent(root))
        return self._recorder.begin(REQUEST, root, root, 0, answer.start_ns, answer.origin)

    def _send_exit(self, opened: Any, result: Any, error: BaseException | None) -> None:
        if opened is not None:
            context.close_span(opened)

    def _send_all_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tokenized in self._all_sent(args, kwargs):
            answer = self._live.get(self._sent_rid(tokenized))
            if answer is not None:
                self._recorder.write(RequestSent(answer.span_id))

    # -- and back -------------------------------------------------------------------------------------------

    def _outputs_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._came_late:
            self._came_late = False
            self._begin_attached(self._outputs_manager(args, kwargs))
        return args, kwargs

    def _begin_attached(self, manager: Any) -> None:
        """What was under way when we came: from its first event on, under the context that it came with."""
        now = time_ns()
        for rid, request in dict(self._in_flight(manager) or {}).items():
            if rid in self._live or self._is_probe(request):
                continue
            serving = _Serving(self, now, manager, None, None)
            headers = self._headers(request)
            serving.origin = context.of_request(headers, self._recorder.sample, self._options.asks_parent)
            model = str(self._model(manager) or "unknown")
            serving.name = f"text_completion {model}"  # the path that it came by is not known any more
            attributes = self._request_attributes(request, "text_completion", model, rid)
            attributes[ATTACHED_FLAG] = True
            answer = self._live[rid] = self._begin(serving, rid, now, serving.origin, attributes)
            answer.is_attached, serving.root = True, answer
            self._recorder.write(RequestSent(answer.span_id))

    def _outputs_exit(self, call: Any, result: Any, error: BaseException | None) -> None:
        outputs, live, index = self._got(*call, result), self._live, -1
        if self._gets_new:
            self._take_new(outputs)
            return
        for rid, reason in self._each_output(outputs):
            index += 1
            answer = live.get(rid)
            if answer is None:
                continue
            answer.latest = (outputs, index)
            if self._content is not None and len(answer.text) < LONGEST:
                answer.text += self._piece(answer.latest) or ""
            if not answer.first_ns:
                answer.first_ns = time_ns()
            if reason is not None:
                del live[rid]
                self._end(answer, self._reason_text(reason) or "unknown")

    def _take_new(self, outputs: Any) -> None:
        live = self._live
        for rid, reason, new, prompt, cached in self._each_new(outputs):
            answer = live.get(rid)
            if answer is None:
                continue
            if answer.tokens is None:
                answer.first_ns = time_ns()
                answer.tokens = prompt, new, cached
            else:
                prompt, before, cached = answer.tokens
                answer.tokens = prompt, before + new, cached
            if reason is not None:
                del live[rid]
                self._end(answer, reason)

    def _abort_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._abort(self._aborted_rid(self._aborted(args, kwargs)))
        return args, kwargs

    def _abort_exit(self, call: Any, result: Any, error: BaseException | None) -> None:
        for rid in self._all_aborted(*call, result) or ():
            self._abort(rid)

    def _abort(self, rid: str) -> None:
        answer = self._live.pop(rid, None)
        if answer is not None:
            self._end(answer, "abort")


def _total(counts: tuple[int | None, ...]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
