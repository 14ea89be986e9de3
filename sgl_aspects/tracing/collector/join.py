"""Joins the records of all processes into OpenTelemetry spans, one trace per request.

What arrives early waits: a scheduler's record may be read before the record that says which trace its
request belongs to. What arrives is never trusted to come in order across processes, only within one.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags, TraceState

from sgl_aspects.tracing import schema
from sgl_aspects.tracing.collector.span_builder import SpanBuilder
from sgl_aspects.tracing.collector.tail import HeldSpans, TailChoice
from sgl_aspects.tracing.context import trace_id_of_root
from sgl_aspects.tracing.export.variables import SpanLimits
from sgl_aspects.tracing.records import (
    UNFINISHED,
    AttributeValue,
    ProcessDescribed,
    Record,
    RequestBegin,
    RequestElsewhere,
    RequestSeen,
    RequestSent,
    SpanBegin,
    SpanEnd,
    SpanType,
)
from sgl_aspects.tracing.ring.reader import RingReader as Writer
from sgl_aspects.tracing.schema import ATTACHED_FLAG, BOOTSTRAP_ROOM

_WAITING_RECORDS = 60_000
_WAITING_SECONDS = 5.0
# A caller may go away just before the scheduler hears of its request. Such a word of the scheduler's waits so
# long, in which a later request with the same id would have been read.
_SEEN_LATE_SECONDS = 1.0
_ENDED_ROOTS = 4096
# Ends of requests that wait until everything written so far is read.
_HELD_ENDS = 10_000
# Cap on open spans: one whose end record was dropped would leak.
_OPEN = 100_000

# Time that a request spent in these children is an attribute of the request span, in seconds.
_LATENCIES = {
    "queue": schema.TIME_IN_QUEUE,
    "prefill": schema.TIME_IN_PREFILL,
    "decode": schema.TIME_IN_DECODE,
}
_OPERATION = schema.OPERATION
_INFERENCE = schema.TIME_IN_INFERENCE
# The caller's process sees it only where the answer comes in pieces. Elsewhere it is when decode began.
_FIRST_TOKEN = schema.TIME_TO_FIRST_TOKEN


@dataclass(eq=False)
class _Root:
    """A span with a trace of its own: a request, or a scheduler's step."""

    context: SpanContext
    begin: RequestBegin | None = None
    #: The request that this is one of several answers to.
    group: _Root | None = None
    is_sent: bool = False
    seen_by: set[str] = field(default_factory=set)
    ids: list[int] = field(default_factory=list)
    latencies: dict[str, float] = field(default_factory=dict)
    last_child_ns: int = 0
    decode_ns: int = 0
    #: 0 while it is under way.
    end_ns: int = 0
    has_ended: bool = False

    @functools.cached_property
    def link(self) -> Link | None:
        """What leads to it from the steps that served it: the same one from each of them."""
        return Link(self.context) if self.context.trace_flags.sampled else None

    @functools.cached_property
    def room(self) -> AttributeValue:
        """Where it is on two servers: what both know of it, and each of its spans says."""
        begun = self.group.begin if self.group is not None else self.begin
        return None if begun is None else begun.attributes.get(BOOTSTRAP_ROOM)

    def was_under_way(self, time_ns: int, grace: float = 0.0) -> bool:
        """Whether the request had begun by then, and had not ended more than ``grace`` seconds before."""
        if self.begin is None or self.begin.start_ns > time_ns:
            return False
        # An end before the beginning (the clock was set back meanwhile) says nothing.
        return self.end_ns < self.begin.start_ns or time_ns <= self.end_ns + grace * 1e9


# Of Joiner._emit_span.
_Arguments: TypeAlias = (
    "tuple[Writer, SpanEnd, _Root, SpanContext | None, SpanKind, str, dict[str, AttributeValue]]"
)


class Joiner:
    """Takes records as they are read, gives ``emit`` spans as they become whole.

    ``recorded``: spans given to ``emit``; ``unfinished``: those of them whose process ended first;
    ``unjoined``: records that belong to no request that was read; ``not_sampled``: spans of requests whose
    caller did not want them, or the sampling and then the ``tail`` choice. ``joins_partial``: in the end
    spans whose request was not read are emitted, too, each request in a trace of its own. ``on_request`` gets
    every request that ends, wanted or not, with the time of its first token in the scheduler (0: none).
    """

    def __init__(
        self,
        resource: Resource,
        emit: Callable[[ReadableSpan], None],
        *,
        joins_partial: bool = False,
        tail: TailChoice | None = None,
        on_request: Callable[[RequestBegin, SpanEnd, int], None] | None = None,
        limits: SpanLimits | None = None,
    ) -> None:
        self._builder = SpanBuilder(resource, limits or SpanLimits())
        self._emit = emit
        self._tail = tail
        self._on_request = on_request
        # Spans of requests that are left out unless their end is bad; the arguments of ``_emit_span``.
        self._undecided: HeldSpans[_Arguments] = HeldSpans()
        self._joins_partial = joins_partial
        self._roots: dict[int, _Root] = {}
        self._requests: dict[str, list[_Root]] = {}
        self._ended: collections.deque[_Root] = collections.deque()
        self._open: dict[tuple[str, int], tuple[Writer, SpanBegin | RequestBegin]] = {}
        self._waiting: collections.deque[tuple[float, Writer, Record]] = collections.deque()
        self._held: list[tuple[Writer, SpanEnd]] = []
        self._held_before: list[tuple[Writer, SpanEnd]] = []
        self._has_news = False
        self._is_replaying = False
        self.recorded = self.unfinished = self.unjoined = self.not_sampled = 0

    def add(self, writer: Writer, record: Record) -> None:
        """One record, in the order in which its writer wrote it."""
        if isinstance(record, SpanEnd) and not record.span_id:
            return  # figures for the metrics
        if self._take(writer, record, is_last_chance=False):
            return
        self._waiting.append((time.monotonic(), writer, record))
        if len(self._waiting) > _WAITING_RECORDS:
            _, writer, record = self._waiting.popleft()
            self._give_up(writer, record)

    def replay(self, records: Iterable[tuple[Writer, Record]]) -> None:
        """Records that an earlier collector took: which requests are open is learnt, nothing is emitted.

        Of a request that is still undecided, what it held is held again.
        """
        self._is_replaying = True
        for writer, record in records:
            self.add(writer, record)
        for _ in range(3):
            self.settle()
        self._is_replaying = False

    def settle(self, *, is_behind: bool = False) -> None:
        """After each reading of all files: what waited for another process's records is tried again.

        ``is_behind``: some file has more to read, so that nothing has waited in vain yet.
        """
        now = time.monotonic()
        is_late = not is_behind and bool(self._waiting) and self._waiting[0][0] + _SEEN_LATE_SECONDS < now
        if self._waiting and (self._has_news or is_late):
            self._has_news = False
            self._retry(now, is_behind)
        # A request's end waits for one more reading, so that its children's times are known.
        if not is_behind or len(self._held) > _HELD_ENDS:
            ends, self._held_before, self._held = self._held_before, self._held, []
            for writer, record in ends:
                self._end_request(writer, record)
        while len(self._open) > _OPEN:
            self._lose(next(iter(self._open)))
        while len(self._ended) > _ENDED_ROOTS:
            self._forget(self._ended.popleft())

    def writer_gone(self, writer: Writer) -> None:
        """Everything of this writer is read and nothing more comes: its open spans end as unfinished."""
        for record in writer.open_steps():
            self.add(writer, record)
        for key, (owner, begin) in list(self._open.items()):
            if owner is writer and isinstance(begin, SpanBegin):
                self._lose(key)

    def finish(self) -> None:
        """The run has ended: nothing waits any longer, requests without an end get one."""
        for _ in range(2):
            self.settle()
        while self._waiting:
            _, writer, record = self._waiting.popleft()
            self._give_up(writer, record)
        for key, (_, begin) in list(self._open.items()):
            if isinstance(begin, RequestBegin):
                self._lose(key)
        self._open.clear()

    def _lose(self, key: tuple[str, int]) -> None:
        """The end of an open span will not come: its process is gone, or had no room to tell."""
        writer, begin = self._open.pop(key)
        if isinstance(begin, SpanBegin):
            root = self._roots.get(begin.root_id)
            end = writer.last_ns
            if root is not None and root.end_ns:  # what it belongs to has ended
                end = min(end, root.end_ns)
            self.add(writer, SpanEnd(*begin, max(end, begin.start_ns), error=UNFINISHED))
        elif begin.span_id in self._roots:
            end = max(writer.last_ns, begin.start_ns, self._roots[begin.span_id].last_child_ns)
            span_id, start = begin.span_id, begin.start_ns
            record = SpanEnd(_NO_TYPE, span_id, span_id, 0, start, end, error=UNFINISHED)
            self._end_request(writer, record)

    def _take(self, writer: Writer, record: Record, is_last_chance: bool) -> bool:
        """Uses the record; False where it has to wait for another."""
        if isinstance(record, SpanEnd):
            return self._take_span(writer, record, is_last_chance)
        if isinstance(record, SpanBegin):
            self._open[writer.name, record.span_id] = (writer, record)
            if record.parent_id == 0:
                self._register(record.span_id, _Root(_context_of_step(record.span_id)))
        elif isinstance(record, RequestBegin):
            self._begin_request(writer, record)
        elif isinstance(record, RequestSent):
            if record.span_id in self._roots:
                self._roots[record.span_id].is_sent = True
                self._has_news = True
        elif isinstance(record, RequestSeen):
            return self._see_request(writer, record, is_last_chance)
        elif isinstance(record, RequestElsewhere):
            flags = _SAMPLED if record.sampled else _NOT_SAMPLED
            root = _Root(SpanContext(record.trace_id, record.span_id, True, flags))
            self._register(record.key, root)
            self._finish_root(root)  # as far as this host is concerned: steps link to it, nothing is below
        elif isinstance(record, ProcessDescribed):
            self._builder.describe(writer, record.attributes)
        return True

    def _begin_request(self, writer: Writer, record: RequestBegin) -> None:
        context = SpanContext(
            record.trace_id,
            record.span_id,
            is_remote=False,
            trace_flags=_SAMPLED if record.sampled else _NOT_SAMPLED,
            trace_state=TraceState.from_header([record.trace_state]) if record.trace_state else None,
        )
        root = _Root(context, record, self._group_of(record))
        if root.group is None and self._tail is not None and self._tail.concerns(record):
            self._undecided.begin(record.span_id)
        self._register(record.span_id, root)
        self._requests.setdefault(record.request_id, []).append(root)
        self._open[writer.name, record.span_id] = (writer, record)

    def _group_of(self, record: RequestBegin) -> _Root | None:
        """The request that this is one of several answers to: what is said of each is said there.

        Else what has its parent's id is somebody who asked, as a request inside another one's hook.
        """
        group = self._roots.get(record.parent_id)
        is_answer = group is not None and group.begin is not None and not record.remote
        return group if is_answer and _OPERATION not in record.attributes else None

    def _see_request(self, writer: Writer, record: RequestSeen, is_late: bool) -> bool:
        """Of the requests with this id it is the one that was under way; else one that ended just before.

        Two engines of one process may each have one under way: each scheduler hears of its own at once.
        """
        requests = self._requests.get(record.request_id, ())
        unseen = [root for root in requests if root.is_sent and writer.name not in root.seen_by]
        found = [root for root in reversed(unseen) if root.was_under_way(record.time_ns)]
        if not found and is_late:
            grace = _SEEN_LATE_SECONDS
            found = [r for r in unseen if not r.seen_by and r.was_under_way(record.time_ns, grace)]
        if found:
            found[0].seen_by.add(writer.name)
            self._register(record.key, found[0])
        return bool(found)

    def _take_span(self, writer: Writer, record: SpanEnd, is_last_chance: bool) -> bool:
        self._open.pop((writer.name, record.span_id), None)  # ended, even if it has to wait for others
        root = self._roots.get(record.root_id)
        if root is None and record.parent_id == 0:
            root = _Root(_context_of_step(record.span_id))
            self._register(record.span_id, root)
        if root is None and record.root_id >> 63:
            # A worker's, of a step that another process writes, maybe on another host: both derive its trace.
            root = _Root(_context_of_step(record.root_id))
            self._register(record.root_id, root)
            self._finish_root(root)
        if root is None and is_last_chance and self._joins_partial:
            root = _Root(_context_of_step(record.root_id))
            self._register(record.root_id, root)
        if root is None:
            return False
        if record.links and not is_last_chance and any(link not in self._roots for link in record.links):
            return False
        if record.parent_id == 0:
            if root.begin is not None:
                root.end_ns = record.end_ns
                self._held.append((writer, record))
            else:
                self._finish_root(root)
                self._emit_span(writer, record, root, None, SpanKind.INTERNAL, record.type.name, {})
            return True
        if root.begin is not None:
            _add_child(root, record)
        # In another process the request goes by a key: what has the key as parent has the request as parent.
        parent, trace = root.context, root.context
        if record.parent_id != record.root_id:
            parent = SpanContext(
                trace.trace_id, record.parent_id, False, trace.trace_flags, trace.trace_state
            )
        self._emit_span(writer, record, root, parent, SpanKind.INTERNAL, record.type.name, {})
        return True

    def _end_request(self, writer: Writer, record: SpanEnd) -> None:
        root = self._roots.get(record.root_id)
        if root is None or root.begin is None or root.has_ended:
            return
        begin = root.begin
        attributes = dict(begin.attributes)
        attributes.update(root.latencies)
        if schema.TIME_IN_PREFILL in root.latencies:
            attributes[_INFERENCE] = sum(
                seconds for name, seconds in root.latencies.items() if "time_in_model" in name
            )
        first_ns = root.decode_ns
        if first_ns >= begin.start_ns:
            attributes[_FIRST_TOKEN] = (first_ns - begin.start_ns) / 1e9
        if root.group is not None and first_ns:
            root.group.decode_ns = min(root.group.decode_ns or first_ns, first_ns)
        parent = None
        if begin.parent_id:
            parent = SpanContext(
                begin.trace_id,
                begin.parent_id,
                begin.remote,
                root.context.trace_flags,
                root.context.trace_state,
            )
        # One of several answers to a request is not a request of its own.
        kind = SpanKind.INTERNAL if root.group is not None else SpanKind.SERVER
        # Of one that was seen in part, because we came or went meanwhile, no figure is right.
        in_part = ATTACHED_FLAG in attributes or (record.error == UNFINISHED and writer.was_let_go)
        if root.group is None and not in_part and not self._is_replaying and self._on_request is not None:
            self._on_request(begin, record, root.decode_ns)
        if record.span_id in self._undecided:
            self._decide(root, record)
        self._emit_span(writer, record, root, parent, kind, begin.name, attributes)
        self._finish_root(root)

    def _decide(self, root: _Root, end: SpanEnd) -> None:
        """A request that sampling left out has ended: its spans are emitted, or go."""
        held = self._undecided.end(end.span_id)
        if self._is_replaying:
            return  # decided before
        if self._tail is None or not self._tail.keeps(end):
            self.not_sampled += len(held)
            return
        root.context = _sampled(root.context)
        root.link = Link(root.context)
        for writer, record, owner, parent, kind, name, attributes in held:
            self._emit_span(writer, record, owner, parent, kind, name, attributes)

    def _emit_span(
        self,
        writer: Writer,
        record: SpanEnd,
        root: _Root,
        parent: SpanContext | None,
        kind: SpanKind,
        name: str,
        attributes: dict[str, AttributeValue],
    ) -> None:
        decider = root.group or root
        if decider.begin is not None and decider.begin.span_id in self._undecided:
            held = (writer, record, root, parent, kind, name, attributes)
            given_up = self._undecided.hold(decider.begin.span_id, held)
            self.not_sampled += 0 if self._is_replaying else given_up
            return
        if self._is_replaying:
            return
        flags = decider.context.trace_flags
        if not flags.sampled:
            self.not_sampled += 1
            return
        if record.error == UNFINISHED and not writer.was_let_go:
            self.unfinished += 1
        self.recorded += 1
        attributes = dict(attributes)
        if root.room is not None:
            attributes[BOOTSTRAP_ROOM] = root.room
        if record.values:
            for key, value in zip(record.type.attributes, record.values):
                if value is not None:
                    attributes[key] = value
        context = SpanContext(root.context.trace_id, record.span_id, False, flags, root.context.trace_state)
        links = self._links(record.links) if record.links else ()
        self._emit(self._builder.build(writer, record, context, parent, kind, name, attributes, links))

    def _links(self, root_ids: Sequence[int]) -> list[Link]:
        links = [self._roots[root_id].link for root_id in root_ids if root_id in self._roots]
        return [link for link in links if link is not None]

    def _register(self, span_id: int, root: _Root) -> None:
        root.ids.append(span_id)
        self._roots[span_id] = root
        if root.begin is not None:
            self._has_news = True  # others may have waited for it; for a step only its own process does

    def _finish_root(self, root: _Root) -> None:
        """Kept for a while: later records of other processes may still name it."""
        if not root.has_ended:
            root.has_ended = True
            self._ended.append(root)

    def _forget(self, root: _Root) -> None:
        for span_id in root.ids:
            self._roots.pop(span_id, None)
        if root.begin is not None:
            same_id = self._requests.get(root.begin.request_id, [])
            if root in same_id:
                same_id.remove(root)
            if not same_id:
                self._requests.pop(root.begin.request_id, None)

    def _retry(self, now: float, is_behind: bool) -> None:
        waiting, self._waiting = self._waiting, collections.deque()
        for since, writer, record in waiting:
            waited = 0.0 if is_behind else now - since
            is_late = isinstance(record, RequestSeen) and waited > _SEEN_LATE_SECONDS
            if self._take(writer, record, is_last_chance=is_late):
                continue
            if waited > _WAITING_SECONDS:
                self._give_up(writer, record)
            else:
                self._waiting.append((since, writer, record))

    def _give_up(self, writer: Writer, record: Record) -> None:
        if not self._take(writer, record, is_last_chance=True) and isinstance(record, SpanEnd):
            self.unjoined += 1


_NO_TYPE = SpanType("")


_SAMPLED, _NOT_SAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)


def _add_child(request: _Root, record: SpanEnd) -> None:
    """What the request's own span will say of it."""
    request.last_child_ns = max(request.last_child_ns, record.end_ns)
    if record.type.name == "decode" and not request.decode_ns:  # one that was retracted has several
        request.decode_ns = record.start_ns
    latency = _LATENCIES.get(record.type.name)
    if latency:
        seconds = max(0, record.end_ns - record.start_ns) / 1e9
        request.latencies[latency] = request.latencies.get(latency, 0.0) + seconds


def _sampled(context: SpanContext) -> SpanContext:
    return SpanContext(
        context.trace_id,
        context.span_id,
        context.is_remote,
        _SAMPLED,
        context.trace_state,
    )


def _context_of_step(span_id: int) -> SpanContext:
    """A root that no request brought along has a trace of its own, whose id follows from the span's."""
    return SpanContext(trace_id_of_root(span_id), span_id, False, _SAMPLED)
