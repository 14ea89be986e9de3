"""Joins the records of all processes into spans that can be exported, one trace per request.

Records that arrive early wait: a scheduler's record may be read before the one that names its request's
trace. Order is relied on within a process only, never across processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import SpanKind

from sgl_aspects.tracing import schema
from sgl_aspects.tracing.collect.reader import RingReader as Writer
from sgl_aspects.tracing.collect.roots import NOTED, Root, Roots
from sgl_aspects.tracing.collect.span_builder import SpanBuilder
from sgl_aspects.tracing.collect.waiting import Waiting
from sgl_aspects.tracing.export.span import UNSET, CollectedSpan, RootContext
from sgl_aspects.tracing.records import (
    UNFINISHED,
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
from sgl_aspects.tracing.sampling import TailChoice
from sgl_aspects.tracing.schema import ADAPTERS, ATTACHED_FLAG, BOOTSTRAP_ROOM, DETACHED_FLAG
from sgl_aspects.tracing.variables import SpanLimits

_WAITING_RECORDS = 60_000
_WAITING_SECONDS = 5.0
# A caller may go away during a long step, before the scheduler sees its request. Such a record of the
# scheduler waits a second, in which a later request with the same id would have been read.
_SEEN_LATE_SECONDS = 1.0
_ENDED_BEFORE_SECONDS = 30.0
# Cap on request ends held until everything written so far is read.
_HELD_ENDS = 10_000
# Cap on spans held for undecided requests; a span is about a kilobyte.
_HELD_SPANS = 20_000
# Cap on open spans: one whose end record was dropped would leak.
_OPEN = 100_000

_PREFILL, _DECODE = schema.TIME_IN_PREFILL, schema.TIME_IN_DECODE
_INFERENCE = schema.TIME_IN_INFERENCE
# The caller's process measures it only for streamed answers. Otherwise it is the start of decode.
_FIRST_TOKEN = schema.TIME_TO_FIRST_TOKEN
_NO_TYPE = SpanType("")
_INTERNAL = SpanKind.INTERNAL
_new: Any = tuple.__new__

# Arguments of Joiner._emit_span.
_Arguments: TypeAlias = "tuple[Writer, SpanEnd, Root, int, bool, SpanKind, str, dict[str, Any] | None]"


class Joiner:
    """Takes records as they are read and calls ``emit`` with each complete span.

    ``recorded``: spans passed to ``emit``; ``unfinished``: those whose process ended first; ``unjoined``:
    records whose request was not read; ``not_sampled``: spans of requests left out by their caller, or by the
    sampling and then the ``tail`` choice. ``joins_partial``: at the end, spans whose request was not read are
    emitted too, each request in a trace of its own. ``on_request`` is called for every request that ends,
    sampled or not, with the time of its first token in the scheduler (0: none); ``on_forgotten`` some time
    after its end, with its ids, when no record refers to it any longer.
    """

    def __init__(
        self,
        resource: Resource,
        emit: Callable[[CollectedSpan], None],
        *,
        joins_partial: bool = False,
        tail: TailChoice | None = None,
        on_request: Callable[[RequestBegin, SpanEnd, int], None] | None = None,
        on_forgotten: Callable[[Sequence[int]], None] | None = None,
        limits: SpanLimits | None = None,
    ) -> None:
        self._builder = SpanBuilder(resource, limits or SpanLimits())
        self._emit = emit
        self._tail = tail
        self._on_request = on_request
        # Spans of requests left out unless they fail or are slow; the arguments of ``_emit_span``.
        self._undecided: Waiting[int, _Arguments] = Waiting()
        self._joins_partial = joins_partial
        self._roots = Roots(on_forgotten)
        self._open: dict[int, tuple[Writer, SpanBegin | RequestBegin]] = {}
        # By request id; by the id of the root that a span belongs or links to.
        self._unmatched: Waiting[str, tuple[float, Writer, RequestSeen]] = Waiting()
        self._rootless: Waiting[int, tuple[float, Writer, SpanEnd]] = Waiting()
        self._sent: list[str] = []  # ids of the requests sent in this pass
        self._held: list[tuple[Writer, SpanEnd]] = []
        self._held_before: list[tuple[Writer, SpanEnd]] = []
        self._held_earlier: set[int] = set()
        self._is_replaying = False
        #: When the last process was woven: requests that began before are seen in part.
        self.woven_ns = 0.0
        self._detaching_ns = math.inf
        # The end of the last pass over all files. Records written before are read in the next pass, however
        # long that takes: a record waits from the end of its own pass.
        self._passed = time.monotonic()
        self.recorded = self.unfinished = self.unjoined = self.not_sampled = 0

    def add(self, writer: Writer, *records: Record) -> None:
        """Take records, in the order in which their writer wrote them."""
        is_detaching = self._detaching_ns < math.inf
        for record in records:
            if is_detaching and getattr(record, "start_ns", 0) >= self._detaching_ns:
                continue  # seen by the processes that still have hooks, not by the others
            if record.__class__ is SpanEnd:
                if not record.span_id:  # for the metrics only, or a request's times on another host
                    if root := self._roots.get(record.root_id):
                        root.note(record)
                elif not self._take_span(writer, record):
                    self._wait_for_root(time.monotonic(), writer, record)
            elif record.__class__ is RequestSeen:
                if not self._see_request(writer, record):
                    self._wait_for_request(time.monotonic(), writer, record)
            else:
                self._take(writer, record)

    def trace_of(self, key: int) -> tuple[int, int] | None:
        """Return the trace id and span id of a request; None if it is unknown or left out by sampling."""
        root = self._roots.get(key)
        return (root.trace_id, root.span_id) if root is not None and root.is_sampled else None

    def about_the_run(self) -> dict[str, str]:
        """Return the run's service, host and role, as far as its processes have told."""
        return self._builder.about_the_run()

    def held(self) -> list[int]:
        """Return the ids of the requests whose end was read and is not counted yet."""
        ends = [record.span_id for _, record in (*self._held_before, *self._held)]
        known = [root for root in map(self._roots.get, ends) if root is not None]
        return [*self._held_earlier, *(root.span_id for root in known if not root.is_counted)]

    def replay(self, records: Iterable[tuple[Writer, Record]], held: set[int]) -> None:
        """Restore the open requests from the records that an earlier collector took; emits nothing.

        The spans held for undecided requests are held again. ``held``: the requests that are not counted,
        though the records of their ends are.
        """
        self._is_replaying, self._held_earlier = True, held
        for writer, record in records:
            self.add(writer, record)
        for _ in range(3):
            self.match_waiting()
        self._is_replaying = False

    def detaching(self, since_ns: int) -> None:
        """Note that hooks are being removed from a process: requests that end later may lack some spans, and
        what begins later is left out.
        """
        self._detaching_ns = min(self._detaching_ns, since_ns)

    def match_waiting(self, *, is_behind: bool = False) -> bool:
        """Retry the records that wait for another process; called after each pass over all files.

        ``is_behind``: some file has more to read, so nothing is given up yet. Returns whether the requests
        that had ended before the last such pass are complete.
        """
        # Only now: of two requests with this id, the first one's end may come after it in this pass.
        for request_id in self._sent:
            for since, owner, seen in self._unmatched.take(request_id):
                if not self._see_request(owner, seen):
                    self._wait_for_request(since, owner, seen)
        self._sent.clear()
        if not is_behind and (self._unmatched.count or self._rootless.count):
            self._end_waiting(self._passed)
        # A request's end waits for one more pass, so that the times of its children are known.
        is_next = not is_behind or len(self._held) > _HELD_ENDS
        if is_next:
            ends, self._held_before, self._held = self._held_before, self._held, []
            for writer, record in ends:
                self._end_request(writer, record)
        while len(self._open) > _OPEN:
            self._lose(next(iter(self._open)))
        self._roots.trim()
        self._passed = time.monotonic()
        return is_next

    def writer_gone(self, writer: Writer) -> None:
        """End the writer's open spans as unfinished: all of its records are read and no more will come."""
        for record in writer.open_steps():
            self.add(writer, record)
        for key, (owner, begin) in list(self._open.items()):
            if owner is writer and isinstance(begin, SpanBegin):
                self._lose(key)

    def finish(self) -> None:
        """End the run: nothing waits any longer, and requests without an end get one."""
        for _ in range(2):
            self.match_waiting()
        for _, writer, seen in sorted(self._unmatched.take_older(math.inf), key=itemgetter(0)):
            self._see_request(writer, seen, is_late=True)
        for _, writer, record in sorted(self._rootless.take_older(math.inf), key=itemgetter(0)):
            self._give_up(writer, record)
        for key, (_, begin) in reversed(self._open.copy().items()):  # a request after its answers
            if isinstance(begin, RequestBegin):
                self._lose(key)
        self._open.clear()

    def _lose(self, key: int) -> None:
        """Close an open span whose end will not come: its process is gone, or dropped the record."""
        writer, begin = self._open.pop(key)
        if isinstance(begin, SpanBegin):
            root = self._roots.get(begin.root_id)
            end = writer.last_ns
            if root is not None and root.end_ns:  # its root has ended
                end = min(end, root.end_ns)
            self.add(writer, SpanEnd(*begin, max(end, begin.start_ns), error=UNFINISHED))
        elif (ended := self._roots.get(begin.span_id)) is not None:
            end = max(writer.last_ns, begin.start_ns, ended.last_child_ns)
            span_id, start = begin.span_id, begin.start_ns
            record = SpanEnd(_NO_TYPE, span_id, span_id, 0, start, end, error=UNFINISHED)
            self._end_request(writer, record)

    def _wait_for_request(self, since: float, writer: Writer, seen: RequestSeen) -> None:
        self._unmatched.add(seen.request_id, (since, writer, seen))
        if self._unmatched.count > _WAITING_RECORDS:
            for _, owner, oldest in self._unmatched.take_first():
                self._see_request(owner, oldest, is_late=True)

    def _wait_for_root(self, since: float, writer: Writer, record: SpanEnd) -> None:
        # Wait for the latest of the links: as a rule the others have come by then.
        named = (record.root_id, *reversed(record.links))
        missing = next(each for each in named if each not in self._roots)
        self._rootless.add(missing, (since, writer, record))
        if self._rootless.count > _WAITING_RECORDS:
            for _, owner, oldest in self._rootless.take_first():
                self._give_up(owner, oldest)

    def _take_waiting(self, span_id: int) -> None:
        """Use the spans that waited for the root of this id."""
        if not self._rootless.count:
            return
        for since, writer, record in self._rootless.take(span_id):
            if not self._take_span(writer, record):
                self._wait_for_root(since, writer, record)

    def _end_waiting(self, now: float) -> None:
        """Give up records that have waited too long; called when everything written is read."""
        for since, writer, seen in self._unmatched.take_older(now - _SEEN_LATE_SECONDS):
            if not self._see_request(writer, seen, is_late=True) and since + _WAITING_SECONDS >= now:
                self._wait_for_request(since, writer, seen)
        for _, writer, record in self._rootless.take_older(now - _WAITING_SECONDS):
            self._give_up(writer, record)

    def _give_up(self, writer: Writer, record: SpanEnd) -> None:
        if not self._take_span(writer, record, is_last_chance=True):
            self.unjoined += 1

    def _take(self, writer: Writer, record: Record) -> None:
        """Take a record that never has to wait."""
        if record.__class__ is SpanBegin:
            self._open[record.span_id] = (writer, record)
            if record.parent_id == 0:
                self._roots.add_step(record.span_id)
                self._take_waiting(record.span_id)
        elif isinstance(record, RequestBegin):
            root, writer.gets_requests = self._roots.add_request(record), True
            if root.group is None and self._tail is not None and self._tail.concerns(record):
                self._undecided.begin(record.span_id)
            self._open[record.span_id] = (writer, record)
            self._take_waiting(record.span_id)
        elif isinstance(record, RequestSent):
            sent = self._roots.get(record.span_id)
            if sent is not None and sent.begin is not None:
                self._roots.send(sent)
                self._sent.append(sent.begin.request_id)
        elif isinstance(record, RequestElsewhere):
            self._roots.add_elsewhere(*record)
            self._take_waiting(record.key)
        elif isinstance(record, ProcessDescribed):
            self._builder.describe(writer, record.attributes)

    def _see_request(self, writer: Writer, record: RequestSeen, is_late: bool = False) -> bool:
        root = self._roots.find(writer.name, record, _ENDED_BEFORE_SECONDS if is_late else None)
        if root is None and is_late and self._builder.is_follower(writer):
            root = self._roots.begun_after(writer.name, record)
        if root is None:
            return False
        self._roots.name(record.key, root)
        self._take_waiting(record.key)
        return True

    def _take_span(self, writer: Writer, record: SpanEnd, is_last_chance: bool = False) -> bool:
        """Use the span; False if it has to wait for another record."""
        type, span_id, root_id, parent_id, _, end_ns, _, _, links = record
        roots = self._roots
        begun = self._open.pop(span_id, None)  # ended, even if it has to wait for other records
        if begun is not None and begun[0] is not writer:
            self._open[span_id] = begun
        root = roots.get(root_id)
        if root is None:
            # A worker's span of a step that another process writes, maybe on another host: both derive its
            # trace.
            is_elsewhere = root_id >> 63
            if parent_id and not is_elsewhere and not (is_last_chance and self._joins_partial):
                return False
            root = roots.add_step(root_id if parent_id else span_id)
            if parent_id and is_elsewhere:
                roots.finish(root)
            self._take_waiting(root_id)
        if links and not is_last_chance and None in map(roots.get, links):
            return False
        is_remote = False
        if parent_id:
            if root.begin is not None:
                if end_ns > root.last_child_ns:
                    root.last_child_ns = end_ns
                if type.name in NOTED:
                    root.note(record)
            # Other processes refer to the request by a key: a span below the key is below the request.
            if parent_id == root_id:
                parent_id, is_remote = root.span_id, root.is_remote
        elif root.begin is not None:
            root.end_ns = end_ns
            root.is_counted = writer.is_counted and span_id not in self._held_earlier
            self._held_earlier.discard(span_id)
            self._held.append((writer, record))
            return True
        else:
            roots.finish(root)
        self._emit_span(writer, record, root, parent_id, is_remote, _INTERNAL, type.name)
        return True

    def _end_request(self, writer: Writer, record: SpanEnd) -> None:
        root = self._roots.get(record.root_id)
        if root is None or root.begin is None or root.has_ended:
            return
        begin = root.begin
        if record.error and root.last_child_ns > record.end_ns:  # its scheduler heard of the abort later
            record = record._replace(end_ns=root.last_child_ns)
        if root.group is not None:
            root.group.last_child_ns = max(root.group.last_child_ns, record.end_ns)
        attributes = {**begin.attributes, **root.waits(), **root.latencies, **root.tiers}
        if _PREFILL in root.latencies:
            attributes[_INFERENCE] = root.latencies[_PREFILL] + root.latencies.get(_DECODE, 0.0)
        first_ns = root.decode_ns
        if first_ns >= begin.start_ns:
            attributes[_FIRST_TOKEN] = (first_ns - begin.start_ns) / 1e9
        if root.group is not None and first_ns:
            root.group.decode_ns = min(root.group.decode_ns or first_ns, first_ns)
        # One of several answers to a request is not a server span of its own.
        kind = SpanKind.INTERNAL if root.group is not None else SpanKind.SERVER
        # A request seen only in part, before attach or after detach, has no valid figures.
        if begin.start_ns < self.woven_ns:
            attributes[ATTACHED_FLAG] = True
        if record.end_ns >= self._detaching_ns or (record.error == UNFINISHED and writer.was_detached):
            attributes[DETACHED_FLAG] = True
        in_part = ATTACHED_FLAG in attributes or DETACHED_FLAG in attributes
        if root.group is None and not in_part and not root.is_counted and self._on_request is not None:
            self._on_request(begin, record, first_ns)
        if record.span_id in self._undecided:
            self._decide(root, record)
        is_remote = begin.remote and begin.parent_id != 0
        self._emit_span(writer, record, root, begin.parent_id, is_remote, kind, begin.name, attributes)
        self._roots.finish(root)

    def _decide(self, root: Root, end: SpanEnd) -> None:
        """Emit or drop the held spans of a request that sampling left out, now that it has ended."""
        held = self._undecided.take(end.span_id)
        if self._is_replaying:
            return  # decided before
        if self._tail is None or not self._tail.keeps(end):
            self.not_sampled += len(held)
            return
        root.is_sampled = True
        for each in held:
            self._emit_span(*each)

    def _emit_span(
        self,
        writer: Writer,
        record: SpanEnd,
        root: Root,
        parent_id: int,
        is_parent_remote: bool,
        kind: SpanKind,
        name: str,
        attributes: dict[str, Any] | None = None,
    ) -> None:
        """Emit a span with what is known beyond its record, unless its request is left out."""
        decider = root.group or root
        if self._is_replaying or not decider.is_sampled:
            if decider.begin is not None and decider.begin.span_id in self._undecided:
                held = (writer, record, root, parent_id, is_parent_remote, kind, name, attributes)
                self._undecided.add(decider.begin.span_id, held)
                while self._undecided.count > _HELD_SPANS and len(self._undecided) > 1:
                    given_up = len(self._undecided.take_first())
                    self.not_sampled += 0 if self._is_replaying else given_up
            elif not self._is_replaying:
                self.not_sampled += 1
            return
        type, span_id, _, _, start_ns, end_ns, values, error, linked = record
        self.recorded += 1
        links: Sequence[RootContext] = ()
        if linked:  # the exported ones among the requests that a step served
            found = [each for each in map(self._roots.get, linked) if each is not None]
            links = [each for each in found if each.is_sampled]
            if self._roots.has_adapters and (adapters := sorted({each.adapter for each in found} - {""})):
                attributes = {**(attributes or {}), ADAPTERS: adapters}
        all_attributes, status, builder = None, UNSET, self._builder
        if error or attributes or builder.adds_attributes or root.room is not None:
            if error == UNFINISHED and not writer.was_detached:
                self.unfinished += 1
            attributes = attributes or {}
            if root.room is not None:
                attributes[BOOTSTRAP_ROOM] = root.room
            all_attributes, links, status = builder.complete(writer, record, kind, attributes, links)
        # The same as CollectedSpan(…), in a third of the time.
        fields = (
            *(builder.resources.get(writer.name) or builder.make_resource(writer), root, span_id, parent_id),
            *(is_parent_remote, kind, name, start_ns, max(start_ns, end_ns), type.attributes, values),
            *(all_attributes, links, status),
        )
        self._emit(_new(CollectedSpan, fields))
