"""The life of a request in the scheduler: queued, each chunk of its prompt, decoding, preempted, ended.

The spans ``queue``, ``prefill`` (one for each chunk), ``decode``, and for engines that have them
``bootstrap`` and ``kv_transfer``, are children of the request's own span, which another process writes. They
never overlap, and each token is in one of them, whatever the order in which the engine's loop reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import monotonic_ns
from typing import Any

from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.record.recorder import Recorder
from sgl_aspects.tracing.records import AttributeValue, RequestElsewhere, RequestSeen, SpanType
from sgl_aspects.tracing.schema import DECODE, PHASES, PREFILL, QUEUE

# One None for each attribute of the phase.
_NOT_KNOWN = {name: (None,) * len(type.attributes) for name, type in PHASES.items()}


@dataclass(eq=False)
class ScheduledRequest:
    """A request in the scheduler. ``key``: its id in this process's records (see ``RequestSeen``).

    ``phase``: the type name of its open span; "" during prefill.
    """

    key: int
    rid: str
    phase: str = ""
    phase_id: int = 0
    phase_ns: int = 0
    #: Attributes of the open phase that are known when it begins.
    values: tuple[AttributeValue, ...] = ()
    chunks: int = 0
    #: The end of the latest chunk, and the output tokens before the open phase.
    fed_ns: int = 0
    decoded: int = 0
    #: Drafts so far, as counted here.
    drafts: Any = field(default_factory=native.DraftCounts)
    #: The engine's own counts: tokens, and how many were accepted at each position.
    drafts_told: tuple[int, list[int]] = (0, [])
    #: Those before the open ``decode``.
    drafts_before: tuple[int, list[int]] = (0, [])
    #: Tokens of its prompt that were fed to the model before its first output.
    fed: int = 0
    #: The phase that follows the last chunk of the prompt.
    after_prefill: str = DECODE.name
    #: The engine's error, if it rejected the request.
    problem: str = ""

    @property
    def decodes(self) -> bool:
        return self.phase == DECODE.name

    @property
    def is_running(self) -> bool:
        return not self.phase or self.decodes

    @property
    def all_drafts(self) -> tuple[int, list[int]]:
        """Tokens drafted so far, and how many of them were accepted at each position."""
        if not self.drafts.drafted:
            return self.drafts_told
        at_least = [*accumulate(reversed(self.drafts.exactly()))]
        return self.drafts.drafted, [count for count in at_least[-2::-1] if count]


@dataclass(eq=False)
class Chunk:
    """A part of one request's prompt in a batch. ``is_last`` None: unknown until the result comes."""

    req: Any
    request: ScheduledRequest
    tokens: int
    start_ns: int
    is_last: bool | None = None


class RequestTracker:
    """The requests of one scheduler, by request id."""

    def __init__(self, recorder: Recorder) -> None:
        self.requests: dict[str, ScheduledRequest] = {}
        #: Preempted requests, which are in the queue again.
        self.preempted_requests: set[ScheduledRequest] = set()
        #: Called with the id of a request that ends, the tokens of its prompt that were fed, its output
        #: tokens, the reason, and the error if any.
        self.on_end: Callable[[str, int, int | None, str | None, str], None] = _discard
        self._processed: list[Chunk] = []
        self._recorder = recorder
        self._announce: Callable[[SpanType, int, int, int, int], None] = recorder.announce
        self._writers = {name: recorder.spans(type) for name, type in PHASES.items()}
        self._write_prefill = recorder.spans(PREFILL)

    def follow(self) -> None:
        """Stop recording requests: another rank runs and records the same ones; the steps link to them."""
        self._announce = self._write_prefill = _discard
        self._writers = dict.fromkeys(self._writers, _discard)

    def queued(
        self,
        rid: str,
        phase: str = QUEUE.name,
        values: tuple[AttributeValue, ...] = (),
        elsewhere: tuple[int, int, bool] | None = None,
    ) -> ScheduledRequest:
        """Open a request that the scheduler got, in ``phase``.

        ``elsewhere``: trace id, span id and sampled flag of a request that another host received.
        """
        recorder, now = self._recorder, monotonic_ns()
        request = ScheduledRequest(recorder.new_id(), rid)
        if elsewhere is None:
            recorder.write(RequestSeen(request.key, str(rid), now))
        else:
            recorder.write(RequestElsewhere(request.key, *elsewhere))
        self.requests[rid] = request
        self._open(request, phase, now, values)
        return request

    def enter(self, rid: str, phase: str, problem: str = "", now: int = 0) -> None:
        """Change the open phase, which ended with ``problem`` if any, to another of ``schema.PHASES``."""
        request = self.requests.get(rid)
        if request is not None and request.phase != phase:
            now = now or monotonic_ns()
            self._close(request, now, problem=problem)
            self._open(request, phase, now)

    def begins_in(
        self,
        rid: str,
        phase: str,
        after_prefill: str = DECODE.name,
        values: tuple[AttributeValue, ...] = (),
    ) -> None:
        """Relabel the queue phase: since it was queued the request has been in this phase."""
        request = self.requests.get(rid)
        if request is not None:
            request.after_prefill = after_prefill
        if request is not None and request.phase == QUEUE.name:
            request.phase, request.values = phase, values
            self._announce(PHASES[phase], request.phase_id, request.key, request.key, request.phase_ns)

    def launched(self, request: ScheduledRequest, now: int) -> None:
        """Close the queue phase: the prompt is in a batch; no-op for one that was before."""
        if request.phase:
            self.preempted_requests.discard(request)
            self._close(request, now)

    def resume(self, request: ScheduledRequest, now: int) -> None:
        """Reopen decode for a preempted request whose tokens are all still in the prefix cache."""
        self.preempted_requests.discard(request)
        self._close(request, now)
        self._open(request, DECODE.name, now)

    def processing(self, chunks: list[Chunk]) -> None:
        """Note that the result of a batch with these chunks is being processed."""
        self._processed = chunks

    def processed(self, problem: str = "", now: int = 0) -> None:
        """End these chunks; requests whose prompts are complete decode from here on."""
        chunks, self._processed = self._processed, []
        self.prefilled(chunks, problem, now)

    def prefilled(self, chunks: Iterable[Chunk], problem: str = "", now: int = 0) -> None:
        """End chunks; after a prompt's last one its request decodes."""
        now = now or monotonic_ns()
        for chunk in chunks:
            request = chunk.request
            key, values = request.key, (chunk.tokens, request.chunks)
            request.chunks += 1
            request.fed += 0 if request.decoded else chunk.tokens
            # With an overlapped loop it was launched before the previous one's end; and a request may have
            # been preempted since.
            start_ns = max(chunk.start_ns, request.fed_ns)
            end_ns = request.fed_ns = max(start_ns, request.phase_ns if request.phase else now)
            self._write_prefill(self._recorder.new_id(), key, key, start_ns, end_ns, values, problem)
            if chunk.is_last and not problem and not request.phase and request.rid in self.requests:
                self._open(request, request.after_prefill, end_ns)

    def prompt_done(self, rid: str, tokens: int, start_ns: int, problem: str = "") -> None:
        """End a prompt that was fed to the model as a whole, of a request in no batch."""
        request = self.requests.get(rid)
        if request is not None:
            self.prefilled([Chunk(None, request, tokens, start_ns, True)], problem)

    def preempted(self, rid: str, output_tokens: int | None) -> None:
        """Put a request back in the queue: memory ran short; prompt and output will be prefilled again."""
        request = self.requests.get(rid)
        if request is None or not request.is_running:
            return
        now = monotonic_ns()
        if request.decodes:
            self._close(request, now, self._decoded(request, output_tokens, "retracted"))
        self.preempted_requests.add(request)
        self._open(request, QUEUE.name, now)

    def finished(
        self, rid: str, output_tokens: int | None, reason: str | None, problem: str = "", now: int = 0
    ) -> None:
        """Close the request, in any phase; no-op if it is unknown."""
        if self._processed:
            self.processed(now=now)  # its last token may come with its prompt
        request = self.requests.pop(rid, None)
        if request is None:
            return
        self.preempted_requests.discard(request)
        values = self._decoded(request, output_tokens, reason) if request.decodes else (reason,)
        self._close(request, now or monotonic_ns(), values, problem)
        self.on_end(rid, request.fed, output_tokens, reason, problem)

    def drafted(self, rid: str, drafted: int, accepted: int) -> None:
        """Note tokens that a step drafted for a request, and how many of them it accepted."""
        request = self.requests.get(rid)
        if request is not None:
            request.drafts.count(drafted, accepted)

    def drafts(self, rid: str, totals: tuple[int, Sequence[int]] | None) -> None:
        """Set the tokens drafted for a request so far, and how many were accepted at each position."""
        request = self.requests.get(rid)
        if request is not None and totals is not None:
            request.drafts_told = totals[0], [*totals[1]]

    def _decoded(
        self, request: ScheduledRequest, output_tokens: int | None, reason: str | None
    ) -> tuple[AttributeValue, ...]:
        """Return the values of the open ``decode``: its tokens are the answer's but for earlier ones'."""
        drafts: tuple[AttributeValue, ...] = ()
        drafted, accepted_at = request.all_drafts
        if drafted:
            before, at = request.drafts_before
            request.drafts_before = drafted, accepted_at
            before_at = [*at, *[0] * len(accepted_at)]
            new_at = [count - earlier for count, earlier in zip(accepted_at, before_at)]
            drafts = drafted - before, sum(new_at), new_at
        if output_tokens is None:
            return (None, reason, *drafts)
        before, request.decoded = request.decoded, output_tokens
        return (output_tokens - before, reason, *drafts)

    def _open(
        self, request: ScheduledRequest, phase: str, now: int, values: tuple[AttributeValue, ...] = ()
    ) -> None:
        span_id = self._recorder.new_id()
        request.phase, request.phase_id, request.phase_ns, request.values = phase, span_id, now, values
        self._announce(PHASES[phase], span_id, request.key, request.key, now)

    def _close(
        self, request: ScheduledRequest, now: int, values: tuple[AttributeValue, ...] = (), problem: str = ""
    ) -> None:
        phase, key, start_ns = request.phase, request.key, request.phase_ns
        if phase:
            request.phase = ""
            own = request.values
            if own[:1] == (None,):  # its finish reason, which is known now
                own = *(values[:1] or own[:1]), *own[1:]
            values = own or values or _NOT_KNOWN[phase]
            self._writers[phase](request.phase_id, key, key, start_ns, max(start_ns, now), values, problem)


def _discard(*fields: Any, **named: Any) -> None:
    """Record nothing."""
