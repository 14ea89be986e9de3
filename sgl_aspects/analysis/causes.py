"""Why a request took as long as it did: each moment has one cause, and the causes add up to its latency.

The phases of a request (tokenize, queue, prefill, decode) divide its life. What they do not tell is read off
the steps of its scheduler: others' prompts in them, a batch without room, time between forward passes. All of
it is computed from spans, after the fact.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from sgl_aspects.analysis.schedulers import Scheduler, Step, schedulers_of
from sgl_aspects.analysis.spans import Span
from sgl_aspects.tracing import schema

_QUEUE, _DECODE = schema.QUEUE.name, schema.DECODE.name
_PREFILL, _TOKENIZE, _DETOKENIZE = schema.PREFILL.name, schema.TOKENIZE.name, schema.DETOKENIZE.name
_CHOICES = f"{schema.REQUEST_PREFIX}choice.count"
#: What OpenAI's API puts before a response's id.
_OPENAI = re.compile("^(chat)?cmpl-")
#: Between two steps a scheduler at work needs less time than this.
_IDLE_NS = 50_000_000
#: A decode step that takes so much longer than usual was held up on the host: a process that was stopped.
_HELD_UP = 10


class Cause(Enum):
    """What a moment of a request was spent on, in the order of a request's life."""

    FRONT_END = "in the front end"
    TOKENIZE = "tokenize"
    HAND_OVER = "on the way to the scheduler"
    GRAMMAR = "its grammar is compiled"
    QUEUED_STEP = "queued: a step under way"
    QUEUED_PREFILL = "queued: others' prefill in front"
    QUEUED_KV_ROOM = "queued: no KV room"
    QUEUED_BATCH_FULL = "queued: batch full"
    QUEUED_IDLE = "queued: the scheduler ran no step"
    TRANSFER = "KV transfer"
    ENCODE = "its prompt is encoded"
    DENOISE = "denoise"
    DECODE_LATENTS = "its image is decoded"
    PREFILL = "own prefill"
    OTHERS_PREFILL = "others' prefill in its steps"
    DECODE = "decode on the device"
    HOST = "host between forward passes"
    STOPPED = "its server was paused, asleep or changed"
    PREEMPTED = "preempted and recomputed"
    DETOKENIZE = "detokenize"
    DELIVERY = "delivery to the caller"
    CALLER = "the caller not reading"


#: Phases that are one cause each, and the cause of what follows until the next phase.
_WHOLE = {
    _TOKENIZE: (Cause.TOKENIZE, Cause.HAND_OVER),
    schema.GRAMMAR.name: (Cause.GRAMMAR, Cause.HOST),
    schema.BOOTSTRAP.name: (Cause.TRANSFER, Cause.HOST),
    schema.KV_TRANSFER.name: (Cause.TRANSFER, Cause.HOST),
    schema.ENCODE.name: (Cause.ENCODE, Cause.HOST),
    schema.DENOISE.name: (Cause.DENOISE, Cause.HOST),
    schema.DECODE_LATENTS.name: (Cause.DECODE_LATENTS, Cause.DELIVERY),
    _DETOKENIZE: (Cause.DETOKENIZE, Cause.DELIVERY),
}


@dataclass
class Explanation:
    """One request's latency by cause. Seconds; ``seconds`` sum to the request's duration.

    ``culprits``: where other requests are the cause, seconds by their span ids: those of ``known`` ones.
    ``own``: the span ids of its answers, whose prompts are its own.
    """

    request: Span
    known: Container[str]
    own: Container[str] = ()
    seconds: dict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    culprits: dict[Cause, dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )

    def add(self, cause: Cause, ns: float, culprits: Iterable[tuple[str, float]] = ()) -> None:
        """Add time to a cause; ``culprits`` are requests' span ids with weights."""
        if ns <= 0:
            return
        weights = list(culprits)
        total = sum(weight for _, weight in weights)
        own = sum(weight for span_id, weight in weights if span_id in self.own)
        if own and cause in (Cause.QUEUED_PREFILL, Cause.OTHERS_PREFILL):
            self.add(Cause.PREFILL, ns * own / total)
            self.add(cause, ns * (1 - own / total), [each for each in weights if each[0] not in self.own])
            return
        self.seconds[cause] += ns / 1e9
        for span_id, weight in weights:
            if span_id in self.known and span_id not in self.own:
                self.culprits[cause][span_id] += ns / 1e9 * weight / total

    def add_unless_stopped(
        self, cause: Cause, ns: float, stopped_ns: float, culprits: Iterable[tuple[str, float]] = ()
    ) -> None:
        """Add time to a cause, but for the part in which the server was stopped."""
        stopped = min(ns, stopped_ns)
        self.add(Cause.STOPPED, stopped)
        self.add(cause, ns - stopped, culprits)

    def ranked(self) -> list[tuple[Cause, float]]:
        """Return causes with their seconds, the longest first."""
        return sorted(self.seconds.items(), key=lambda each: -each[1])

    def worst(self, cause: Cause) -> list[tuple[str, float]]:
        """Return the culprits of a cause with their seconds, the longest first."""
        return sorted(self.culprits.get(cause, {}).items(), key=lambda each: -each[1])


class Gap(NamedTuple):
    """The time between two tokens of a request; ``step`` brought the second.

    ``owner``: the span id of the request, or of the one of its answers.
    """

    step: Span
    start_ns: int
    owner: str

    @property
    def seconds(self) -> float:
        return max(0, self.step.end_ns - self.start_ns) / 1e9


class Causes:
    """Explains requests of a run.

    ``spans``: all of the run's, from one or several hosts with aligned clocks. ``answers``: by the span id of
    a request for several, its answers, each of which has phases of its own.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.requests = [span for span in spans if span.is_server]
        self.answers: dict[str, list[Span]] = defaultdict(list)
        #: Requests and answers: what steps are linked to.
        self.by_id = {span.span_id: span for span in self.requests}
        for span in spans:
            if not span.is_server and schema.REQUEST_ID in span.attributes and span.parent_id in self.by_id:
                self.answers[span.parent_id].append(span)
        self.by_id.update((span.span_id, span) for found in self.answers.values() for span in found)
        self._children: dict[str, list[Span]] = defaultdict(list)
        for span in spans:
            if span.parent_id in self.by_id:
                self._children[span.parent_id].append(span)
        self._schedulers = schedulers_of(spans, self.by_id)

    def find(self, text: str) -> list[Span]:
        """Return the requests and answers with this request, response or trace id.

        Without one, those with an id that begins so; a request stands for its answers. Ids are taken as
        clients and ``top`` show them: with OpenAI's prefix, in quotes, or cut.
        """
        text = text.strip().strip("'\"").rstrip("…")
        known = [(span, list(_names(span))) for span in self.by_id.values()]
        wanted = dict.fromkeys((text, _OPENAI.sub("", text)))
        for each in wanted:
            if exact := [span for span, names in known if each in names]:
                return exact
        for each in wanted:
            found = [span for span, names in known if any(name.startswith(each) for name in names)]
            if found:
                return [span for span in found if self.by_id.get(span.parent_id) not in found]
        return []

    def steps(self) -> Iterator[Span]:
        """Yield the steps of the schedulers; of ranks that run the same, those of the one that answers."""
        return (step.span for scheduler in self._schedulers.values() for step in scheduler.steps)

    def has_steps(self, request: Span) -> bool:
        """Return whether steps were recorded while the request was in its scheduler: they are at level 2."""
        computed = [span for span in self._phases(request) if span.name in (_PREFILL, _DECODE)]
        return bool(self._schedulers) and (
            not computed
            or any(step.span.start_ns < span.end_ns for span in computed for step in self._steps_in(span))
        )

    def explain(self, request: Span) -> Explanation:
        """Divide the request's duration among its causes; that of several answers by those it waited for."""
        found = self._explanation(request)
        now, phase = request.start_ns, Cause.FRONT_END
        if self._is_sent_at_once(request):
            phase = Cause.HAND_OVER
        decoded: set[str] = set()
        was_preempted = False
        phases = self._phases(request)
        # A front end may hold requests back while its scheduler is stopped.
        served = next((self._scheduler_of(span) for span in phases if span.name == _QUEUE), Scheduler([], {}))
        for span in phases:
            start, end = max(now, span.start_ns), min(span.end_ns, request.end_ns)
            if end <= now:
                continue
            if span.name == _QUEUE:  # of its answers, one may begin when another ended: a beam search
                was_preempted = span.parent_id in decoded
            gap = Cause.PREEMPTED if was_preempted else phase
            if gap is Cause.HOST:
                self._within_steps(found, span, now, start)
            elif gap is Cause.HAND_OVER:  # a scheduler takes messages between two steps
                self._before_batch(found, span, now, start, gap)
            else:
                found.add_unless_stopped(gap, start - now, served.stopped_ns(now, start))
            phase = self._add_phase(found, span, start, end, was_preempted and span.name != _DECODE)
            if span.name == _DECODE:
                decoded.add(span.parent_id)
                was_preempted = False
            now = end
        unread = self._unread_ns(request, now)
        found.add(Cause.CALLER, unread)
        found.add(phase if phase is not Cause.HOST else Cause.DELIVERY, request.end_ns - now - unread)
        return found

    def _explanation(self, request: Span) -> Explanation:
        own = {answer.span_id for answer in self.answers.get(request.span_id, ())}
        return Explanation(request, self.by_id, own)

    def _unread_ns(self, request: Span, after_ns: int) -> float:
        """Return for how long after its phases the answer waited for the caller to read."""
        for span in self._children[request.span_id]:
            if span.name == schema.WAIT_FOR_CALLER.name and span.end_ns > span.start_ns:
                share = span.number(schema.UNREAD_TIME) * 1e9 / (span.end_ns - span.start_ns)
                return share * max(0, min(span.end_ns, request.end_ns) - max(span.start_ns, after_ns))
        return 0.0

    def gaps(self, request: Span) -> list[Gap]:
        """Return the times between the request's tokens, the first of which begins its decode phase.

        A step that makes several tokens for a request (speculation) is one gap. Empty at level 1.
        """
        found: list[Gap] = []
        latest = 0
        for span in (each for each in self._phases(request) if each.name == _DECODE):
            now = latest or span.start_ns  # it goes on after it was preempted
            steps = [step for step in self._steps_in(span) if span.parent_id in step.members]
            steps = [step for step in steps if step.span.start_ns < span.end_ns]
            if not latest and steps and not steps[0].is_decode and steps[0].span.start_ns <= span.start_ns:
                del steps[0]  # it brought the first token
            for step in steps:
                found.append(Gap(step.span, now, span.parent_id))
                now = step.span.end_ns
            latest = now
        return found

    def explain_gap(self, request: Span, gap: Gap) -> Explanation:
        """Divide the time between two tokens among its causes."""
        found = self._explanation(request)
        scheduler, end = self._schedulers[gap.step.place], gap.step.end_ns
        steps = [step for step in scheduler.ended(gap.start_ns, end) if step.span.end_ns <= end]
        self._add_gap(found, steps, gap.start_ns, end, Cause.DECODE, scheduler, gap.owner)
        return found

    def device_seconds(self) -> dict[str, float]:
        """Return requests' parts of their steps' device time, by span id: by the tokens that each step fed.

        They add up to the device time of all steps with requests. A request has its answers' parts.
        """
        found: dict[str, float] = defaultdict(float)
        for step in (step for scheduler in self._schedulers.values() for step in scheduler.steps):
            tokens = {one: step.prompts.get(one) or 1.0 for one in step.members}
            for one, fed in tokens.items():
                owner = self.by_id.get(one)
                whole = owner.parent_id if owner is not None and not owner.is_server else one
                found[whole] += step.device_ns / 1e9 * fed / sum(tokens.values())
        return found

    def _phases(self, request: Span) -> list[Span]:
        """Return the request's phases by start; detokenize last, as it runs beside decode."""
        names = {*_WHOLE, _QUEUE, _PREFILL, _DECODE}
        served = [request, *self._awaited(request)]
        found = [span for one in served for span in self._children[one.span_id] if span.name in names]
        return sorted(found, key=lambda span: (span.name == _DETOKENIZE, span.start_ns))

    def _is_sent_at_once(self, request: Span) -> bool:
        """Return whether it is for an image, or an answer whose prompt is in the prefix cache."""
        is_one_of_several = not request.is_server or request.number(_CHOICES) > 1
        names = {span.name for span in self._children[request.span_id]}
        is_for_image = schema.DENOISE.name in names
        return (is_one_of_several or is_for_image) and _QUEUE in names and _TOKENIZE not in names

    def _awaited(self, request: Span) -> Iterator[Span]:
        """Yield the answers that a request waited for: the last, and the one that ended before that began."""
        start_ns = float("inf")
        for answer in sorted(self.answers.get(request.span_id, []), key=lambda each: -each.end_ns):
            if answer.end_ns <= start_ns:
                yield answer
                start_ns = answer.start_ns

    def _add_phase(self, found: Explanation, span: Span, start: int, end: int, is_preempted: bool) -> Cause:
        """Add one phase; returns the cause of what follows it until the next."""
        if is_preempted:
            scheduler = self._scheduler_of(span)
            held = [each for step in self._steps_in(span) for each in scheduler.holders(step)]
            others = [each for each in held if each[0] != span.parent_id]
            stopped_ns = scheduler.stopped_ns(start, end)
            found.add_unless_stopped(Cause.PREEMPTED, end - start, stopped_ns, others)
            return Cause.PREEMPTED
        if span.name in _WHOLE:
            cause, following = _WHOLE[span.name]
            found.add(cause, end - start)
            return following
        if span.name == _QUEUE:
            self._before_batch(found, span, start, end, Cause.QUEUED_IDLE)
            return Cause.HOST
        self._within_steps(found, span, start, end)
        return Cause.HOST if span.name == _PREFILL else Cause.DELIVERY

    def _steps_in(self, span: Span) -> Sequence[Step]:
        return self._scheduler_of(span).ended(span.start_ns, span.end_ns)

    def _scheduler_of(self, span: Span) -> Scheduler:
        """Return the scheduler that wrote the span; one without steps at level 1."""
        return self._schedulers.get(span.place) or Scheduler([], {})

    def _before_batch(self, found: Explanation, span: Span, start: int, end: int, idle: Cause) -> None:
        """Divide a time before the first batch by the steps that ran; ``idle``: the cause if none did."""
        scheduler = self._scheduler_of(span)
        own, now = span.parent_id, start
        for step in scheduler.ended(start, end):
            began, ended = max(now, step.span.start_ns), min(end, step.span.end_ns)
            if own in step.members or began >= end or ended <= now:
                continue
            if began - now > _IDLE_NS or step.span.start_ns < span.start_ns:
                found.add_unless_stopped(idle, began - now, scheduler.stopped_ns(now, began))
                now = began
            others = culprits = step.others(own)
            if others:
                cause = Cause.QUEUED_PREFILL
            elif idle is not Cause.QUEUED_IDLE:
                cause = idle
            elif step.span.start_ns < span.start_ns:  # it could not be in this one
                cause = Cause.QUEUED_STEP
            elif scheduler.was_batch_full(step, own):
                cause, culprits = Cause.QUEUED_BATCH_FULL, [(one, 1.0) for one in sorted(step.members)]
            else:
                cause, culprits = Cause.QUEUED_KV_ROOM, scheduler.holders(step)
            found.add_unless_stopped(cause, ended - now, scheduler.stopped_ns(now, ended), culprits)
            now = ended
        found.add_unless_stopped(idle, end - now, scheduler.stopped_ns(now, end))

    def _within_steps(self, found: Explanation, span: Span, start: int, end: int) -> None:
        """Divide a time of prefill or decode from one result of the request to the next."""
        scheduler = self._scheduler_of(span)
        own, now = span.parent_id, start
        cause = Cause.PREFILL if span.name == _PREFILL else Cause.DECODE
        pending: list[Step] = []
        for step in scheduler.ended(start, end):
            pending.append(step)
            if own not in step.members or step.span.end_ns > end:
                continue
            self._add_gap(found, pending, now, step.span.end_ns, cause, scheduler, own)
            pending, now = [], step.span.end_ns
        if now == start and not any(step.span.start_ns < span.end_ns for step in self._steps_in(span)):
            found.add(cause, end - now)  # level 1 at that time: no steps are known
        else:
            pending = [step for step in pending if step.span.start_ns < end]
            self._add_gap(found, pending, now, end, cause, scheduler, own)

    def _add_gap(
        self,
        found: Explanation,
        steps: list[Step],
        start: int,
        end: int,
        cause: Cause,
        scheduler: Scheduler,
        own: str,
    ) -> None:
        """Add a time between two results of ``own``; ``steps`` ended in it, or were under way at its end."""
        parts: list[tuple[Cause, float, list[tuple[str, float]]]] = []
        usual = scheduler.usual_decode_ns
        longest = max(_IDLE_NS, _HELD_UP * usual)
        for step in steps:
            inside = min(step.device_ns, max(0, min(end, step.span.end_ns) - max(start, step.span.start_ns)))
            others = step.others(own)
            if others and own not in step.members:
                parts.append((Cause.OTHERS_PREFILL, inside, others))
            elif others:
                share = step.prompts.get(own, 0.0) / sum(step.prompts.values())
                mine = inside * share if own in step.prompts else min(inside, usual)
                parts += [(cause, mine, []), (Cause.OTHERS_PREFILL, inside - mine, others)]
            elif own in step.members:  # of those without, a pipeline runs some at once
                was_held_up = step.is_decode and inside > longest
                parts.append((cause, usual if was_held_up else inside, []))
        total = sum(ns for _, ns, _ in parts)
        scale = min(1.0, (end - start) / total) if total else 0.0
        for which, ns, culprits in parts:
            found.add(which, ns * scale, culprits)
        stopped_ns = scheduler.stopped_ns(start, end, is_running=True)
        found.add_unless_stopped(Cause.HOST, end - start - total * scale, stopped_ns)


def _names(request: Span) -> Iterator[str]:
    """Yield the ids by which the request is known."""
    for key in (schema.REQUEST_ID, schema.RESPONSE_ID, schema.HEADER_REQUEST_ID):
        value = request.attributes.get(key)
        yield from map(str, value) if isinstance(value, list) else (str(value or ""),)
    if request.is_server:
        yield request.trace_id
