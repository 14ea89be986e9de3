"""Why a request took as long as it did: each moment has one cause, and the causes add up to its latency.

The phases of a request (tokenize, queue, prefill, decode) divide its life. What they do not tell is read off
the steps of its scheduler: others' prompts in them, a batch without room, time between forward passes. All of
it is computed from spans, after the fact.
"""

from __future__ import annotations

import bisect
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from sgl_aspects.analysis.spans import Span
from sgl_aspects.tracing import schema

_STEP, _QUEUE, _DECODE = schema.STEP.name, schema.QUEUE.name, schema.DECODE.name
_PREFILL, _TOKENIZE, _DETOKENIZE = schema.PREFILL.name, schema.TOKENIZE.name, schema.DETOKENIZE.name
_GRAMMAR = schema.GRAMMAR.name
_TRANSFERS = (schema.BOOTSTRAP.name, schema.KV_TRANSFER.name)
#: The scheduler's mode of a batch in which each request gets its next token.
_DECODING = "decode"
#: Between two steps a scheduler at work needs less time than this.
_IDLE_NS = 50_000_000
#: A decode step that takes so much longer than usual was held up on the host: a process that was stopped.
_HELD_UP = 10
#: With less, the KV cache tells nothing about its size.
_LEAST_USAGE = 0.05


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
    PREFILL = "own prefill"
    OTHERS_PREFILL = "others' prefill in its steps"
    DECODE = "decode on the device"
    HOST = "host between forward passes"
    PREEMPTED = "preempted and recomputed"
    DETOKENIZE = "detokenize"
    DELIVERY = "delivery to the caller"


@dataclass
class Explanation:
    """One request's latency by cause. Seconds; ``seconds`` sum to the request's duration.

    ``culprits``: where other requests are the cause, seconds by their span ids.
    """

    request: Span
    seconds: dict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    culprits: dict[Cause, dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )

    def add(self, cause: Cause, ns: float, culprits: Iterable[tuple[str, float]] = ()) -> None:
        """Add time to a cause; ``culprits`` are requests' span ids with weights."""
        if ns <= 0:
            return
        self.seconds[cause] += ns / 1e9
        weights = list(culprits)
        total = sum(weight for _, weight in weights)
        for span_id, weight in weights:
            self.culprits[cause][span_id] += ns / 1e9 * weight / total

    def ranked(self) -> list[tuple[Cause, float]]:
        """Return causes with their seconds, the longest first."""
        return sorted(self.seconds.items(), key=lambda each: -each[1])


class Gap(NamedTuple):
    """The time between two tokens of a request; ``step`` brought the second."""

    step: Span
    start_ns: int

    @property
    def seconds(self) -> float:
        return max(0, self.step.end_ns - self.start_ns) / 1e9


@dataclass
class _Step:
    """A step of a scheduler, and the prompts in it: request span id → tokens."""

    span: Span
    members: frozenset[str]
    device_ns: float = 0.0
    prompts: dict[str, float] = field(default_factory=dict)

    @property
    def is_decode(self) -> bool:
        return self.span.attributes.get(schema.MODE) == _DECODING

    def others(self, own: str) -> list[tuple[str, float]]:
        """Return the other requests whose prompts are in this step, with their tokens."""
        return [(one, tokens) for one, tokens in self.prompts.items() if one != own and tokens > 0]


class _Scheduler:
    """The steps of one scheduler's process, by the end of each. ``prompts``: tokens by request."""

    def __init__(self, steps: list[_Step], prompts: Mapping[str, float]) -> None:
        self.steps = sorted(steps, key=lambda step: step.span.end_ns)
        self._ends = [step.span.end_ns for step in self.steps]
        self._prompts = prompts
        device = [step.device_ns for step in steps if step.is_decode]
        self.usual_decode_ns = statistics.median(device) if device else 0.0

    @cached_property
    def _largest_batch(self) -> float:
        return max(step.span.number(schema.BATCH_SIZE) for step in self.steps)

    @cached_property
    def _capacity(self) -> float:
        """Tokens that the KV cache holds, as its usage tells of the running requests' tokens; 0: unknown."""
        counts: Counter[str] = Counter()
        found = []
        for step in self.steps:
            counts.update(step.members)
            usage = step.span.number(schema.KV_USAGE)
            if step.is_decode and usage > _LEAST_USAGE:
                found.append(sum(self._prompts.get(one, 0) + counts[one] for one in step.members) / usage)
        return statistics.median(found) if found else 0.0

    def what_was_full(self, step: _Step, request: str) -> Cause:
        """Return why the request was not in this step, which began after it had come.

        The largest batch of the run is taken for the limit of running requests.
        """
        free = (1 - step.span.number(schema.KV_USAGE)) * self._capacity
        if self._capacity and self._prompts.get(request, 0) > free:
            return Cause.QUEUED_KV_ROOM
        is_full = step.span.number(schema.BATCH_SIZE) >= self._largest_batch
        return Cause.QUEUED_BATCH_FULL if is_full else Cause.QUEUED_KV_ROOM

    def ended(self, after_ns: int, until_ns: int) -> Sequence[_Step]:
        """Return the steps whose results came in this time, and the one that was under way at its end."""
        first = bisect.bisect_right(self._ends, after_ns)
        last = bisect.bisect_right(self._ends, until_ns)
        return self.steps[first : last + 1]


class Causes:
    """Explains requests of a run.

    ``spans``: all of the run's, from one or several hosts with aligned clocks.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.requests = [span for span in spans if span.is_server]
        self._children: dict[str, list[Span]] = defaultdict(list)
        root_of = {span.trace_id: span.span_id for span in self.requests}
        by_process: dict[tuple[str, int], list[_Step]] = defaultdict(list)
        steps: dict[str, _Step] = {}
        prefills: list[Span] = []
        for span in spans:
            if span.name == _STEP:
                step = steps[span.trace_id] = _Step(span, frozenset(span.links))
                by_process[span.host, span.process_id].append(step)
            elif span.trace_id in root_of:
                self._children[span.trace_id].append(span)
                if span.name == _PREFILL:
                    prefills.append(span)
        _add_device_times(spans, steps)
        for place, found in by_process.items():
            _add_prompts(found, [span for span in prefills if (span.host, span.process_id) == place], root_of)
        prompts = {each.span_id: each.number(schema.INPUT_TOKENS) for each in self.requests}
        self._schedulers = {place: _Scheduler(found, prompts) for place, found in by_process.items()}

    def find(self, text: str) -> list[Span]:
        """Return the requests with this request, response or trace id, or else with one that begins so."""

        def names(request: Span) -> Iterator[str]:
            for key in (schema.REQUEST_ID, schema.RESPONSE_ID, schema.HEADER_REQUEST_ID):
                value = request.attributes.get(key)
                yield from map(str, value) if isinstance(value, list) else (str(value or ""),)
            yield request.trace_id

        exact = [request for request in self.requests if text in names(request)]
        return exact or [each for each in self.requests if any(name.startswith(text) for name in names(each))]

    def explain(self, request: Span) -> Explanation:
        """Divide the request's duration among its causes."""
        found = Explanation(request)
        now, phase = request.start_ns, Cause.FRONT_END
        has_decoded = was_preempted = False
        for span in self._phases(request):
            start, end = max(now, span.start_ns), min(span.end_ns, request.end_ns)
            if end <= now:
                continue
            if span.name == _QUEUE and has_decoded:
                was_preempted = True
            gap = Cause.PREEMPTED if was_preempted else phase
            if gap is Cause.HOST:
                self._within_steps(found, span, now, start)
            elif gap is Cause.HAND_OVER:  # a scheduler takes messages between two steps
                self._before_batch(found, span, now, start, gap)
            else:
                found.add(gap, start - now)
            phase = self._add_phase(found, span, start, end, was_preempted and span.name != _DECODE)
            if span.name == _DECODE:
                has_decoded, was_preempted = True, False
            now = end
        found.add(phase if phase is not Cause.HOST else Cause.DELIVERY, request.end_ns - now)
        return found

    def gaps(self, request: Span) -> list[Gap]:
        """Return the times between the request's tokens, the first of which begins its decode phase.

        A step that makes several tokens for a request (speculation) is one gap. Empty at level 1.
        """
        found: list[Gap] = []
        latest = 0
        for span in (each for each in self._phases(request) if each.name == _DECODE):
            now = latest or span.start_ns  # it goes on after it was preempted
            for step in self._scheduler_of(span).ended(span.start_ns, span.end_ns):
                is_first = step.span.start_ns <= span.start_ns and not step.is_decode
                if request.span_id not in step.members or (is_first and not latest):
                    continue
                found.append(Gap(step.span, now))
                latest = now = step.span.end_ns
        return found

    def explain_gap(self, request: Span, gap: Gap) -> Explanation:
        """Divide the time between two tokens among its causes."""
        found = Explanation(request)
        scheduler = self._schedulers[gap.step.host, gap.step.process_id]
        steps = [
            step
            for step in scheduler.ended(gap.start_ns, gap.step.end_ns)
            if step.span.end_ns <= gap.step.end_ns
        ]
        self._add_gap(found, steps, gap.start_ns, gap.step.end_ns, Cause.DECODE, scheduler)
        return found

    def device_seconds(self) -> dict[str, float]:
        """Return requests' parts of their steps' device time, by span id: by the tokens that each step fed.

        They add up to the device time of all steps with requests.
        """
        found: dict[str, float] = defaultdict(float)
        for step in (step for scheduler in self._schedulers.values() for step in scheduler.steps):
            tokens = {one: step.prompts.get(one) or 1.0 for one in step.members}
            for one, fed in tokens.items():
                found[one] += step.device_ns / 1e9 * fed / sum(tokens.values())
        return found

    def _phases(self, request: Span) -> list[Span]:
        """Return the request's phases by start; detokenize last, as it runs beside decode."""
        names = (_TOKENIZE, _GRAMMAR, _QUEUE, *_TRANSFERS, _PREFILL, _DECODE, _DETOKENIZE)
        found = [span for span in self._children[request.trace_id] if span.name in names]
        return sorted(found, key=lambda span: (span.name == _DETOKENIZE, span.start_ns))

    def _add_phase(self, found: Explanation, span: Span, start: int, end: int, is_preempted: bool) -> Cause:
        """Add one phase; returns the cause of what follows it until the next."""
        if is_preempted:
            found.add(Cause.PREEMPTED, end - start)
            return Cause.PREEMPTED
        if span.name == _TOKENIZE:
            found.add(Cause.TOKENIZE, end - start)
            return Cause.HAND_OVER
        if span.name == _QUEUE:
            self._before_batch(found, span, start, end, Cause.QUEUED_IDLE)
            return Cause.HOST
        if span.name == _GRAMMAR:
            found.add(Cause.GRAMMAR, end - start)
            return Cause.HOST
        if span.name in _TRANSFERS:
            found.add(Cause.TRANSFER, end - start)
            return Cause.HOST
        if span.name == _DETOKENIZE:
            found.add(Cause.DETOKENIZE, end - start)
            return Cause.DELIVERY
        self._within_steps(found, span, start, end)
        return Cause.HOST if span.name == _PREFILL else Cause.DELIVERY

    def _scheduler_of(self, span: Span) -> _Scheduler:
        """Return the scheduler that wrote the span; one without steps at level 1."""
        return self._schedulers.get((span.host, span.process_id)) or _Scheduler([], {})

    def _before_batch(self, found: Explanation, span: Span, start: int, end: int, idle: Cause) -> None:
        """Divide a time before the first batch by the steps that ran; ``idle``: the cause if none did."""
        scheduler = self._scheduler_of(span)
        own, now = found.request.span_id, start
        for step in scheduler.ended(start, end):
            began, ended = max(now, step.span.start_ns), min(end, step.span.end_ns)
            if own in step.members or began >= end or ended <= now:
                continue
            if began - now > _IDLE_NS or step.span.start_ns < span.start_ns:
                found.add(idle, began - now)
                now = began
            others = step.others(own)
            if others:
                found.add(Cause.QUEUED_PREFILL, ended - now, others)
            elif idle is not Cause.QUEUED_IDLE:
                found.add(idle, ended - now)
            elif step.span.start_ns < span.start_ns:  # it could not be in this one
                found.add(Cause.QUEUED_STEP, ended - now)
            else:
                found.add(scheduler.what_was_full(step, own), ended - now)
            now = ended
        found.add(idle, end - now)

    def _within_steps(self, found: Explanation, span: Span, start: int, end: int) -> None:
        """Divide a time of prefill or decode from one result of the request to the next."""
        scheduler = self._scheduler_of(span)
        own, now = found.request.span_id, start
        cause = Cause.PREFILL if span.name == _PREFILL else Cause.DECODE
        pending: list[_Step] = []
        for step in scheduler.ended(start, end):
            pending.append(step)
            if own not in step.members or step.span.end_ns > end:
                continue
            self._add_gap(found, pending, now, step.span.end_ns, cause, scheduler)
            pending, now = [], step.span.end_ns
        if now == start and not pending:
            found.add(cause, end - now)  # level 1: no steps are known
        else:
            self._add_gap(
                found, [step for step in pending if step.span.start_ns < end], now, end, cause, scheduler
            )

    def _add_gap(
        self,
        found: Explanation,
        steps: list[_Step],
        start: int,
        end: int,
        cause: Cause,
        scheduler: _Scheduler,
    ) -> None:
        """Add the time between two results; ``steps`` ended in it, or were under way at its end."""
        own = found.request.span_id
        parts: list[tuple[Cause, float, list[tuple[str, float]]]] = []
        usual = scheduler.usual_decode_ns
        longest = max(_IDLE_NS, _HELD_UP * usual)
        for step in steps:
            inside = min(step.device_ns, max(0, min(end, step.span.end_ns) - max(start, step.span.start_ns)))
            others = step.others(own)
            if own not in step.members:
                parts.append((Cause.OTHERS_PREFILL if others else Cause.HOST, inside, others))
            elif others and own not in step.prompts:
                mine = min(inside, usual)
                parts += [(cause, mine, []), (Cause.OTHERS_PREFILL, inside - mine, others)]
            elif others:
                tokens = sum(step.prompts.values())
                mine = inside * step.prompts[own] / tokens
                parts += [(cause, mine, []), (Cause.OTHERS_PREFILL, inside - mine, others)]
            elif step.is_decode and inside > longest:
                parts.append((cause, usual, []))
            else:
                parts.append((cause, inside, []))
        total = sum(ns for _, ns, _ in parts)
        scale = min(1.0, (end - start) / total) if total else 0.0
        for which, ns, culprits in parts:
            found.add(which, ns * scale, culprits)
        found.add(Cause.HOST, end - start - total * scale)


def _add_device_times(spans: Iterable[Span], steps: dict[str, _Step]) -> None:
    """Give each step the time of its forward passes: on the device if known, else on the host.

    Only one replayed graph in several is timed: the others get the median of those of their size.
    """
    timed: dict[tuple[object, ...], list[float]] = defaultdict(list)
    untimed: list[tuple[_Step, Span, tuple[object, ...]]] = []
    for span in spans:
        step = steps.get(span.trace_id)
        if step is None or span.name != schema.FORWARD.name:
            continue
        kind = tuple(span.attributes.get(key) for key in (schema.MODE, schema.BATCH_SIZE, schema.GRAPH))
        if schema.DEVICE_TIME in span.attributes:
            seconds = span.number(schema.DEVICE_TIME)
            timed[kind].append(seconds)
            step.device_ns = max(step.device_ns, seconds * 1e9)
        else:
            untimed.append((step, span, kind))
    for step, span, kind in untimed:
        seconds = statistics.median(timed[kind]) if timed[kind] else span.seconds
        step.device_ns = max(step.device_ns, seconds * 1e9)
    for step in steps.values():
        if not step.device_ns:  # level 2
            step.device_ns = step.span.end_ns - step.span.start_ns


def _add_prompts(steps: list[_Step], prefills: list[Span], root_of: dict[str, str]) -> None:
    """Tell the steps which prompts are in them: a chunk belongs to the step whose result ends it."""
    ordered = sorted((step for step in steps if not step.is_decode), key=lambda step: step.span.end_ns)
    ends = [step.span.end_ns for step in ordered]
    for prefill in prefills:
        root = root_of[prefill.trace_id]
        at = bisect.bisect_left(ends, prefill.end_ns)
        near = [step for step in ordered[max(0, at - 2) : at + 3] if root in step.members]
        if near:
            closest = min(near, key=lambda step: abs(step.span.end_ns - prefill.end_ns))
            closest.prompts[root] = closest.prompts.get(root, 0.0) + prefill.number(schema.PREFILL_TOKENS)
