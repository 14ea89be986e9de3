"""The requests and steps that records refer to: by span id, by a process's key, by request id."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import TraceState

from sgl_aspects.tracing import schema
from sgl_aspects.tracing.context import trace_id_of_root
from sgl_aspects.tracing.export.span import RootContext
from sgl_aspects.tracing.records import AttributeValue, RequestBegin, RequestSeen, SpanEnd

_ENDED = 4096
_ROOM = schema.BOOTSTRAP_ROOM
#: Time that a request spent in these children is an attribute of the request span, in seconds.
LATENCIES = {
    "queue": schema.TIME_IN_QUEUE,
    "prefill": schema.TIME_IN_PREFILL,
    "decode": schema.TIME_IN_DECODE,
}
#: In which a request comes to its scheduler.
_FIRST_PHASES = (schema.QUEUE.name, schema.GRAMMAR.name, schema.BOOTSTRAP.name)
#: The spans below a request that ``Root.note`` reads.
NOTED = frozenset((*LATENCIES, *_FIRST_PHASES, schema.TOKENIZE.name))


@dataclass(eq=False, slots=True)
class Root(RootContext):
    """A span with a trace of its own: a request, or a scheduler's step."""

    is_sampled: bool = True
    begin: RequestBegin | None = None
    #: The request that this is one of several answers to.
    group: Root | None = None
    is_sent: bool = False
    #: By the name of the process that saw it.
    seen_by: dict[str, RequestSeen] = field(default_factory=dict)
    ids: tuple[int, ...] = ()
    #: The attributes of its phases, in seconds.
    latencies: dict[str, float] = field(default_factory=dict)
    #: Its cached tokens that its scheduler found beyond the device's memory, by the attributes of ``queue``.
    tiers: dict[str, AttributeValue] = field(default_factory=dict)
    #: When its tokenizing began and ended, and when its scheduler got it; 0: not known.
    tokenize_ns: int = 0
    tokenized_ns: int = 0
    queued_ns: int = 0
    last_child_ns: int = 0
    #: The first start of decoding: a preempted request has several.
    decode_ns: int = 0
    #: 0 while open.
    end_ns: int = 0
    has_ended: bool = False
    #: Whether an earlier collector counted it.
    is_counted: bool = False
    #: The bootstrap room of a request on two servers, an attribute of each of its spans.
    room: AttributeValue = None
    #: The LoRA adapter of a request: what its caller asked for, if not the served model.
    adapter: str = ""

    def was_under_way(self, time_ns: int, grace: float = 0.0) -> bool:
        """Return whether the request was open then, or had ended at most ``grace`` seconds before."""
        if self.begin is None or self.begin.start_ns > time_ns:
            return False
        # An end before the start (the clock was set back) is ignored.
        return self.end_ns < self.begin.start_ns or time_ns <= self.end_ns + grace * 1e9

    def note(self, record: SpanEnd) -> None:
        """Note a span below it whose times are among its attributes."""
        name, start_ns, end_ns = record[0].name, record[4], record[5]
        if latency := LATENCIES.get(name):
            seconds = (end_ns - start_ns) / 1e9 if end_ns > start_ns else 0.0
            self.latencies[latency] = self.latencies.get(latency, 0.0) + seconds
            if latency is schema.TIME_IN_DECODE and not self.decode_ns:
                self.decode_ns = start_ns
        if len(record.values) > 1 and name == schema.QUEUE.name:
            self.tiers |= {tier: count for tier, count in zip(schema.TIERS, record.values[1:]) if count}
        if name in _FIRST_PHASES:
            self.queued_ns = min(self.queued_ns or start_ns, start_ns)
            if self.group is not None:
                self.group.queued_ns = min(self.group.queued_ns or start_ns, start_ns)
        elif name == schema.TOKENIZE.name:
            self.tokenize_ns = min(self.tokenize_ns or start_ns, start_ns)
            self.tokenized_ns = max(self.tokenized_ns, end_ns)

    def waits(self) -> dict[str, float]:
        """Return the attributes of what it waited for before its first phase, in seconds."""
        found: dict[str, float] = {}
        since_ns = self.begin.start_ns if self.begin is not None else 0
        if self.tokenize_ns:
            found[schema.TIME_TO_TOKENIZE] = max(0, self.tokenize_ns - since_ns) / 1e9
            since_ns = self.tokenized_ns
        if self.queued_ns:
            found[schema.TIME_TO_QUEUE] = max(0, self.queued_ns - since_ns) / 1e9
        return found


class Roots:
    """The roots that later records may refer to; of those that have ended, the latest few thousand.

    ``on_forgotten`` is called with the ids of each request of this host that is forgotten.
    """

    def __init__(self, on_forgotten: Callable[[Sequence[int]], None] | None = None) -> None:
        self._on_forgotten = on_forgotten
        self._by_id: dict[int, Root] = {}
        self._requests: dict[str, list[Root]] = {}
        self._ended: collections.deque[Root] = collections.deque()
        self.get = self._by_id.get
        #: Whether any request had a LoRA adapter.
        self.has_adapters = False

    def __contains__(self, span_id: int) -> bool:
        return span_id in self._by_id

    def name(self, span_id: int, root: Root) -> None:
        """Let records refer to the root by ``span_id``."""
        root.ids += (span_id,)
        self._by_id[span_id] = root

    def add_request(self, begin: RequestBegin) -> Root:
        state = TraceState.from_header([begin.trace_state]).to_header() if begin.trace_state else ""
        group = self._group_of(begin) if begin.parent_id else None
        root = Root(
            begin.trace_id,
            begin.span_id,
            trace_state=state,
            is_sampled=begin.sampled,
            begin=begin,
            group=group,
        )
        told = (begin if group is None or group.begin is None else group.begin).attributes
        root.room = told.get(_ROOM)
        asked, served = told.get(schema.REQUEST_MODEL), told.get(schema.RESPONSE_MODEL)
        if asked != served and asked and served:
            root.adapter, self.has_adapters = str(asked), True
        self.name(begin.span_id, root)
        self._requests.setdefault(begin.request_id, []).append(root)
        return root

    def add_step(self, span_id: int) -> Root:
        """Add a root without a caller's context; its trace id is derived from its span id."""
        root = Root(trace_id_of_root(span_id), span_id)
        self.name(span_id, root)
        return root

    def add_elsewhere(self, key: int, trace_id: int, span_id: int, sampled: bool) -> None:
        """Add a request of another host. It counts as ended: no span here has it as its child."""
        root = Root(trace_id, span_id, is_remote=True, is_sampled=sampled)
        self.name(key, root)
        self.finish(root)

    def _group_of(self, begin: RequestBegin) -> Root | None:
        """Return the request that this is one of several answers to, whose figures include this one's.

        A request made inside another one's hook also has a local parent, but an operation of its own.
        """
        group = self._by_id.get(begin.parent_id)
        is_answer = group is not None and group.begin is not None and not begin.remote
        return group if is_answer and schema.OPERATION not in begin.attributes else None

    def find(self, writer: str, seen: RequestSeen, grace: float | None = None) -> Root | None:
        """Return the request with this id that was open at ``seen.time_ns``; None if there is none.

        Otherwise, with ``grace`` (in seconds), an unclaimed request with this id that ended just before, or
        the latest that only other processes claimed: the detokenizer gets a request after its scheduler. Two
        engines of one process may each have one open: each scheduler claims its own.
        """
        requests = self._requests.get(seen.request_id, ())
        for root in reversed(requests):
            if root.is_sent and writer not in root.seen_by and root.was_under_way(seen.time_ns):
                break
        else:
            sent = [root for root in requests if root.is_sent and writer not in root.seen_by]
            late = [root for root in sent if root.was_under_way(seen.time_ns, grace or 0.0)]
            if grace is None or not late:
                return None
            root = next((root for root in late if not root.seen_by), late[-1])
        root.seen_by[writer] = seen
        return root

    def begun_after(self, writer: str, seen: RequestSeen) -> Root | None:
        """Return the request with this id that began within a second: where the front end is not Python, one
        rank begins it, perhaps after a follower has it.
        """
        for root in self._requests.get(seen.request_id, ()):
            if root.begin is not None and 0 < root.begin.start_ns - seen.time_ns < 1_000_000_000:
                root.seen_by[writer] = seen
                return root
        return None

    def send(self, root: Root) -> None:
        """Note that it was sent, and give it the records that went to the one before it with its id: its
        scheduler may have been read just before the caller.
        """
        root.is_sent = True
        for other in self._requests[root.begin.request_id][-2:] if root.begin is not None else ():
            for writer, seen in list(other.seen_by.items()):
                if root.was_under_way(seen.time_ns) and not other.was_under_way(seen.time_ns):
                    root.seen_by[writer] = other.seen_by.pop(writer)
                    other.ids = tuple(span_id for span_id in other.ids if span_id != seen.key)
                    self.name(seen.key, root)

    def finish(self, root: Root) -> None:
        """Keep the root for a while: later records of other processes may still refer to it."""
        if not root.has_ended:
            root.has_ended = True
            self._ended.append(root)

    def trim(self) -> None:
        while len(self._ended) > _ENDED:
            self._forget(self._ended.popleft())

    def _forget(self, root: Root) -> None:
        for span_id in root.ids:
            self._by_id.pop(span_id, None)
        if root.begin is not None:
            if self._on_forgotten is not None:
                self._on_forgotten(root.ids)
            same_id = self._requests.get(root.begin.request_id, [])
            if root in same_id:
                same_id.remove(root)
            if not same_id:
                self._requests.pop(root.begin.request_id, None)
