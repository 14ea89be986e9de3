"""The life of a request as its caller sees it: received, tokenized, sent, answered, ended.

A request is one span ``chat {model}`` or ``text_completion {model}``, with ``tokenize`` and ``detokenize``
below it. One for several answers (a batch of prompts, or n > 1) has a child span for each answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic_ns
from typing import Any

from sgl_aspects.engines.base import Engine
from sgl_aspects.tracing import context
from sgl_aspects.tracing.context import Opened, TraceContext
from sgl_aspects.tracing.lifecycle.exchanges import Exchange, Part
from sgl_aspects.tracing.lifecycle.process import ProcessTracker
from sgl_aspects.tracing.options import TraceOptions, no_headers, tenant_of
from sgl_aspects.tracing.record.recorder import Recorder
from sgl_aspects.tracing.records import (
    AttributeValue,
    Latest,
    RequestBegin,
    RequestSeen,
    RequestSent,
    SpanType,
)
from sgl_aspects.tracing.schema import (
    ATTACHED_FLAG,
    BOOTSTRAP_ROOM,
    DECODE,
    DETOKENIZE,
    HEADER_REQUEST_ID,
    INPUT_MESSAGES,
    LEFT_ERRORS,
    OPERATION,
    OUTPUT_TYPE,
    PREFILL,
    PRIORITY,
    PROVIDER,
    QUEUE,
    REQUEST,
    REQUEST_ATTRIBUTES,
    REQUEST_ID,
    REQUEST_MODEL,
    REQUEST_PREFIX,
    RESPONSE_MODEL,
    SYSTEM,
    TEMPLATE,
    TENANT,
    TOKENIZE,
    WAIT_FOR_ADAPTER,
    WAIT_FOR_CALLER,
)

# Cap on requests in the detokenizer: one that is aborted in the scheduler's queue again has no last output.
_MOST_DETOKENIZING = 50_000


@dataclass(eq=False)
class Call:
    """An open request, or one of several answers to one. Times are in nanoseconds.

    ``of``: the request that it is an answer to; ``rids``: the ids by which its answers are found.
    ``exchange``: for the first request of an HTTP exchange. ``response_id``: the client's id of the answer,
    where it is not ``rid``. ``latest``: the message with its latest output,
    and the index in it; ``tokens``: prompt, output and cached ones, if they are not read from there.
    ``reason``: why it ended, once it has.

    ``ends_with_output``: its last output ends it; otherwise the function that serves it, or with
    ``ends_with_exchange`` its exchange. For several answers: ``answers`` in the order in which they began,
    ``answers_left`` how many are open, ``samples`` of each prompt.
    """

    span_id: int
    rid: str
    start_ns: int
    origin: TraceContext
    name: str
    of: Call | None = None
    exchange: Exchange | None = None
    response_id: str = ""
    streams: bool = True
    ends_with_output: bool = True
    ends_with_exchange: bool = False
    is_attached: bool = False
    elsewhere: int | None = None  # its scheduler's number, if that is on another host
    #: Its front end is not Python: it begins and ends where its scheduler gets it and ends it.
    is_here: bool = False
    is_group: bool = False
    #: Of a beam search by many requests of the engine's own (``answers``): its prompts, which the first have.
    searched: int = 0
    samples: int = 1
    answers_left: int = 0
    answers: list[Call] = field(default_factory=list)
    rids: set[str] = field(default_factory=set)
    text: str = ""
    first_ns: int = 0
    latest: tuple[Any, int] | None = None
    tokens: tuple[int | None, int | None, int | None] | None = None
    reason: str | None = None
    #: The engine's error, if it rejected the request, and its HTTP status where the exchange's does not tell.
    problem: str = ""
    status: int | None = None
    has_ended: bool = False
    #: Of all its detokenize calls: span id, start, end, total time and number.
    detokenize: list[int] = field(default_factory=list)

    @property
    def answers_of_the_caller(self) -> list[Call]:
        """The answers without those that only prefill the prompts, which come before all samples."""
        prompts = len(self.answers) // (self.samples + 1) if self.samples > 1 else 0
        return self.answers[prompts:]


class CallTracker:
    """The requests that this process received, by id in ``live``: the only writer of their spans.

    ``came_late``: requests may be open that began before attach: see ``begin_attached``.
    """

    def __init__(
        self,
        engine: Engine,
        recorder: Recorder,
        options: TraceOptions,
        process: ProcessTracker | None = None,
    ) -> None:
        self.live: dict[str, Call] = {}
        #: Requests detokenized here but received elsewhere: as ``Call.detokenize``, by id.
        self.detokenizing: Latest[str, list[int]] = Latest(_MOST_DETOKENIZING)
        self.came_late = options.attached
        self.content = options.content
        self._tenant = options.tenant
        self._recorder, self._engine = recorder, engine
        provider = engine.provider_name
        self._provider = (
            {PROVIDER: provider, SYSTEM: provider} if options.older_names else {PROVIDER: provider}
        )
        self._process = process or ProcessTracker(recorder)
        self._parent_based = options.parent_based
        self._write_request = recorder.spans(REQUEST)
        parts = (TEMPLATE, TOKENIZE, WAIT_FOR_ADAPTER, WAIT_FOR_CALLER)
        self._parts = {type: recorder.spans(type) for type in parts}
        self._write_detokenize = recorder.spans(DETOKENIZE)
        self._phases = {type: recorder.spans(type) for type in (QUEUE, PREFILL, DECODE)}
        #: By scheduler on another host: this clock less its, in nanoseconds, at most.
        self._clocks: dict[int, int] = {}
        reader = engine.reader
        self._rids = reader("request.rids")
        self._response_id = reader("request.response_id")
        self._headers = reader("request.headers") if options.takes_context else no_headers
        self._operation = reader("request.operation")
        self._messages = reader("request.messages")
        self._shared_key = reader("request.shared_key")
        self._is_probe = reader("request.is_probe")
        self._received_ns = reader("request.received_ns")
        self._attributes = {
            REQUEST_PREFIX + name: reader(f"request.{name.replace('.', '_')}") for name in REQUEST_ATTRIBUTES
        }
        more = {PRIORITY: "priority", BOOTSTRAP_ROOM: "bootstrap_room", OUTPUT_TYPE: "output_type"}
        self._attributes |= {name: reader(f"request.{attribute}") for name, attribute in more.items()}
        self._is_first = reader("request.is_first_server")
        self._is_first_server = reader("manager.is_first_server")
        self._model = reader("manager.model")
        self._requested_model = reader("request.model")
        self._description = reader("manager.description")
        self._in_flight = reader("manager.in_flight")
        self._counts, self._tiers = reader("outputs.counts"), reader("outputs.tiers")
        self._reason = reader("outputs.reason")

    # -- begun ----------------------------------------------------------------------------------------------

    def begin(
        self,
        request: Any,
        manager: Any,
        start_ns: int,
        *,
        rid: str = "",
        origin: TraceContext | None = None,
        headers: Any = None,
        operation: str | None = None,
        more: dict[str, AttributeValue] | None = None,
    ) -> Call:
        """Open a request that was received. ``origin``: its trace, if not from its ``headers``."""
        recorder = self._recorder
        tenant = tenant_of(headers, self._tenant)
        if own := self._headers(request):
            headers = {**(headers or {}), **own}
        key = self._shared_key(request)
        shared = None
        if key is not None:
            shared = key, bool(self._is_first_server(manager) or self._is_first(request))
        if origin is None:
            origin = context.of_request(headers, recorder.sample, self._parent_based, shared)
        served = str(self._model(manager) or "unknown")
        if not self._process.has_service and served != "unknown":
            self._process.describe(self._description(manager) or {"service": served})
        model = self._requested_model(request) or served
        operation = operation or str(self._operation(request) or "text_completion")
        rid = rid or self._rids(request)[0]
        attributes: dict[str, AttributeValue] = {
            OPERATION: operation,
            **self._provider,
            REQUEST_MODEL: model,
            RESPONSE_MODEL: served,
            REQUEST_ID: str(rid),
            **(more or {}),
        }
        for name, read in self._attributes.items():
            value = read(request)
            if value is not None and value != ():
                attributes[name] = value
        if tenant := tenant or tenant_of(headers, self._tenant):
            attributes[TENANT] = tenant
        callers_id = (headers or {}).get("x-request-id")
        if callers_id:
            attributes[HEADER_REQUEST_ID] = [callers_id]
        if self.content is not None:
            prompt = self.content.input(self._messages(request))
            if prompt is not None:
                attributes[INPUT_MESSAGES] = prompt
        is_root_of_both = shared is not None and shared[1] and not origin.parent_id
        span_id = context.span_id_of_shared(key) if is_root_of_both else recorder.new_id()
        call = Call(span_id, rid, start_ns, origin, f"{operation} {model}")
        call.response_id = str(self._response_id(request) or "")
        return self._begun(call, attributes)

    def begin_answers(self, call: Call, rids: tuple[str, ...]) -> None:
        """Open these answers of a request for several answers."""
        origin, now = call.origin, monotonic_ns()
        parent = TraceContext(origin.trace_id, call.span_id, origin.sampled, origin.state, False)
        for rid in rids:
            answer = Call(self._recorder.new_id(), rid, now, parent, call.name, of=call, streams=call.streams)
            answer.exchange, answer.is_attached = call.exchange, call.is_attached
            self.live[rid] = self._begun(answer, {REQUEST_ID: str(rid)})
            call.answers.append(answer)
            call.rids.add(rid)

    def begin_here(self, message: Any, manager: Any, rid: str, prompt_tokens: int | None) -> None:
        """Open a request that no function in Python received, as its scheduler gets it."""
        start_ns = self._received_ns(message) or monotonic_ns()
        call = self.live[rid] = self.begin(message, manager, start_ns, rid=rid)
        call.is_here, call.streams, call.tokens = True, False, (prompt_tokens, None, None)
        self.sent(call)

    def end_here(
        self, rid: str, fed: int, output_tokens: int | None, reason: str | None, problem: str
    ) -> None:
        """End it; no-op for a request that a function in Python received."""
        call = self.live.get(rid)
        if call is not None and call.is_here:
            del self.live[rid]
            prompt = call.tokens[0] if call.tokens is not None else None
            call.tokens = prompt, output_tokens, None if prompt is None else max(0, prompt - fed)
            if problem and not fed:  # refused, or given up before the model saw it
                call.tokens = None
            self.end(call, reason, problem)

    def begin_attached(self, manager: Any) -> None:
        """Open the requests that began before attach, from their first event on, in their caller's trace."""
        self.came_late, now = False, monotonic_ns()
        for rid, request in dict(self._in_flight(manager) or {}).items():
            if rid not in self.live and not self._is_probe(request):
                call = self.live[rid] = self.begin(request, manager, now, rid=rid, more={ATTACHED_FLAG: True})
                call.is_attached, call.streams = True, False
                self._recorder.write(RequestSent(call.span_id))

    def _begun(self, call: Call, attributes: dict[str, AttributeValue]) -> Call:
        begin = RequestBegin(call.span_id, str(call.rid), call.start_ns, *call.origin, call.name, attributes)
        self._recorder.write(begin)
        return call

    # -- on its way -----------------------------------------------------------------------------------------

    def enter(self, call: Call) -> Opened:
        """Make the request current until ``context.leave`` is called with the result."""
        root = call.span_id
        return self._recorder.enter(REQUEST, root, root, 0, call.start_ns, call.origin)

    def enter_tokenize(self, call: Call) -> tuple[Call, int, int, Opened]:
        """Open the ``tokenize`` span; ``tokenized`` takes the result."""
        span_id, root, now = self._recorder.new_id(), call.span_id, monotonic_ns()
        return call, span_id, now, self._recorder.enter(TOKENIZE, span_id, root, root, now, call.origin)

    def tokenized(self, token: tuple[Call, int, int, Opened], count: int | None, problem: str) -> None:
        """Close the ``tokenize`` span. ``count``: tokens, if known."""
        (call, span_id, start_ns, opened), end_ns = token, monotonic_ns()
        context.leave(opened)
        root = call.span_id
        self._parts[TOKENIZE](span_id, root, root, start_ns, end_ns, (count,), problem)

    def add_part(self, call: Call, type: SpanType, part: Part) -> None:
        """Record a whole ``chat_template``, ``tokenize``, ``wait_for_…`` of the request."""
        self._parts[type](self._recorder.new_id(), call.span_id, call.span_id, *part)

    def sent(self, call: Call) -> None:
        """Record that the request is about to be handed to the scheduler."""
        self._recorder.write(RequestSent(call.span_id))

    def sent_away(self, rid: str, scheduler: int) -> None:
        """Note that the request's scheduler is on another host; no-op if it is not open."""
        if call := self.live.get(rid):
            call.elsewhere = scheduler

    def add_times(self, rid: str, times: Sequence[float]) -> None:
        """Record how long the phases of a request took on another host, for its attributes: no spans.

        ``times``: when each began, and the last one ended, in seconds of the other host's clock. That is set
        by the answer that came soonest: others wait for this process. No request is queued before it begins.
        """
        call = self.live.get(rid)
        if call is None or call.elsewhere is None or not all(times):
            return
        key, clock = call.span_id, monotonic_ns() - int(times[-1] * 1e9)
        self._clocks[call.elsewhere] = clock = min(clock, self._clocks.get(call.elsewhere, clock))
        clock = max(clock, call.start_ns - int(times[0] * 1e9))
        starts = [int(time * 1e9) + clock for time in times]
        for (type, write), start_ns, end_ns in zip(self._phases.items(), starts, starts[1:]):
            write(0, key, key, start_ns, end_ns, (None,) * len(type.attributes))

    def enter_detokenize(self, call: Call) -> tuple[Call, int, Opened]:
        """Enter a detokenize call; ``detokenized`` takes the result. All calls are one span."""
        now, root = monotonic_ns(), call.span_id
        if not call.detokenize:
            call.detokenize = [self._recorder.new_id(), now, now, 0, 0]
        span_id, start_ns = call.detokenize[:2]
        return call, now, self._recorder.enter(DETOKENIZE, span_id, root, root, start_ns, call.origin)

    def detokenized(self, token: tuple[Call, int, Opened]) -> None:
        (call, start_ns, opened), now = token, monotonic_ns()
        context.leave(opened)
        parts = call.detokenize
        parts[2], parts[3], parts[4] = now, parts[3] + now - start_ns, parts[4] + 1

    def detokenized_here(self, rid: str, start_ns: int, end_ns: int, busy_ns: int, *, is_last: bool) -> None:
        """Record a detokenize call that several requests share, received here or by another process."""
        parts = self.detokenizing.get(rid)
        if parts is None:
            call = self.live.get(rid)
            key = self._recorder.new_id() if call is None else call.span_id
            parts = self.detokenizing[rid] = [key, start_ns, end_ns, 0, 0]
            if call is None:
                self._recorder.write(RequestSeen(key, str(rid), start_ns))
        parts[2], parts[3], parts[4] = end_ns, parts[3] + busy_ns, parts[4] + 1
        if is_last:
            del self.detokenizing[rid]
            self._write_detokenized(self._recorder.new_id(), parts[0], parts)

    def _write_detokenized(self, span_id: int, root: int, parts: list[int]) -> None:
        _, start_ns, end_ns, busy_ns, calls = parts
        self._write_detokenize(span_id, root, root, start_ns, end_ns, (calls, busy_ns / 1e9))

    # -- ended ----------------------------------------------------------------------------------------------

    def end(self, call: Call, reason: str | None, problem: str = "") -> None:
        """Note the last output, or that there will be none. ``problem``: an exception's type."""
        call.reason, call.problem = reason, problem
        if call.of is not None:
            self.record(call, problem)
            call = call.of
            call.answers_left -= 1
            if call.answers_left:
                return
        if call.ends_with_output:
            self.fail(call, problem)

    def abort(self, rid: str, problem: str = "", status: int | None = None) -> None:
        """Abort the request, for the engine's ``problem`` if any; no-op if it is not open."""
        call = self.live.pop(rid, None)
        if call is not None:
            call.status = status
            self.end(call, "abort", problem)

    def leave(self, call: Call, problem: str, is_closed: bool) -> None:
        """Note that the serving function has ended: by an exception (``problem``), or closed."""
        for rid in call.rids:
            answer = self.live.pop(rid, None)
            if answer is not None and answer is not call:
                self.record(answer, problem or "unfinished")
        exchange = call.exchange
        if call.ends_with_exchange and not problem:
            if exchange is not None:
                exchange.at_end.append(partial(self._end_streamed, call, exchange))
                return
            call.reason = self._reason(call.latest) if call.latest else None
        if call.reason is not None or (call.is_group and (is_closed or not call.answers_left)):
            problem = call.problem  # the answer is complete
        self.fail(call, problem)

    def fail(self, call: Call, problem: str) -> None:
        """Write its span; of an answer in one piece, or a problem, once the response has given its status."""
        exchange = call.exchange
        if exchange is not None and not exchange.first_ns and (problem or not exchange.is_shared):
            exchange.at_end.append(partial(self._record_sent, call, exchange, problem))
            # Read last: the server's thread may be ending it. Nobody gets the response after a hang-up.
            if exchange.is_over or exchange.is_gone():
                self._record_sent(call, exchange, problem)
        else:
            self.record(call, problem)

    def _record_sent(self, call: Call, exchange: Exchange, problem: str) -> None:
        is_left = not (exchange.is_whole or exchange.status) and problem not in LEFT_ERRORS
        self.record(call, "abort" if is_left else problem)

    def refuse(self, exchange: Exchange, operation: str | None, headers: Any, problem: str = "") -> None:
        """Record a request that never reached the engine: it was rejected, or its caller had hung up.

        Without an ``operation`` it is the one that the engine knows.
        """
        if not self._recorder.level:
            return
        operation = operation or str(self._operation(None) or "text_completion")
        origin = context.of_request(headers, self._recorder.sample, self._parent_based)
        call = Call(self._recorder.new_id(), "", exchange.start_ns, origin, operation, exchange=exchange)
        self._begun(call, {OPERATION: operation, **self._provider})
        values = [None] * (len(REQUEST.attributes) - 1)
        status = exchange.status or None
        self._write(call, monotonic_ns(), [*values, status], problem or str(status or "abort"))

    def delivered(self, call: Call, exchange: Exchange, reason: str | None) -> None:
        """End a request whose engine has ended it, when its caller has the answer, or is gone."""
        self._add_unread(call, exchange)
        self.end(call, reason)

    def _add_unread(self, call: Call, exchange: Exchange) -> None:
        if exchange.unread:
            start_ns, end_ns, total_ns = exchange.unread
            self.add_part(call, WAIT_FOR_CALLER, (start_ns, end_ns, (total_ns / 1e9,), ""))

    def _end_streamed(self, call: Call, exchange: Exchange) -> None:
        """End a streamed request when its response is complete or its client is gone."""
        self.live.pop(call.rid, None)
        call.reason = self._reason(call.latest) if exchange.is_whole else "abort"
        self.record(call)

    def record(self, call: Call, problem: str = "") -> None:
        """Write the span, once; ``problem``: the error, if its end does not carry one."""
        if call.has_ended:
            return
        call.has_ended, end_ns, exchange = True, monotonic_ns(), call.exchange
        answers = call.answers_of_the_caller if call.is_group else [call]
        counts = [one.tokens or self._counts(one.latest) for one in answers if one.tokens or one.latest]
        prompt, output, cached = map(_total, zip(*counts)) if counts else (None, None, None)
        tiers = self._tiers(call.latest) if call.latest and not call.is_group else None
        if call.is_group:  # a prompt counts once, for all of its samples
            prompt, cached = (total and total // call.samples for total in (prompt, cached))
        if call.searched and counts:
            prompt, _, cached = map(_total, zip(*counts[: call.searched]))
        reasons = [one.reason for one in answers if one.reason]
        # For a non-streamed answer, only the scheduler sees the first token.
        first_ns = min((one.first_ns for one in answers if one.first_ns), default=0) if call.streams else 0
        response_id, status, parsed = call.response_id or str(call.rid), call.status, None
        if exchange is not None and call.of is None:
            first_ns = first_ns and (exchange.first_ns or first_ns)
            response_id = exchange.response_id or response_id
            parsed = exchange.parsed_ns / 1e9 or None
            self._add_unread(call, exchange)
        to_first = (first_ns - call.start_ns) / 1e9 if first_ns and first_ns >= call.start_ns else None
        problem = problem or next(filter(None, (self._engine.outcome(one).problem for one in reasons)), "")
        if exchange is not None and exchange.status >= 400:
            status = exchange.status
        if status:
            if problem:
                prompt = output = cached = None
            problem = problem or str(status)  # of the server, after the engine's answer
        if call.detokenize:
            self._write_detokenized(call.detokenize[0], call.span_id, call.detokenize)
        if parts := self.detokenizing.pop(call.rid, None):  # there was no last output
            self._write_detokenized(self._recorder.new_id(), call.span_id, parts)
        text = None
        if self.content is not None:
            text = self.content.output(call.text, call.reason or problem)
        of_request: list[AttributeValue] = [
            response_id,
            reasons or None,
            to_first,
            prompt,
            output,
            cached,
            to_first,
            max(0, end_ns - call.start_ns) / 1e9 if not call.is_attached else None,
            text,
            *(tiers or (None, None)),
            parsed,
            status,
        ]
        self._write(call, end_ns, of_request, problem)

    def _write(self, call: Call, end_ns: int, values: list[AttributeValue], problem: str) -> None:
        root = call.span_id
        self._write_request(root, root, 0, call.start_ns, end_ns, values, problem)


def _total(counts: tuple[int | None, ...]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
