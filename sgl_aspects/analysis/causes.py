"""Why a request took as long as it did: each moment has one cause, and the causes add up to its latency.

The phases of a request (tokenize, queue, prefill, decode) divide its life. What they do not tell is read off
the steps of its scheduler: others' prompts in them, a batch without room, time between forward passes. All of
it is computed from spans, after the fact.
"""

from __future__ import annotations

import bisect
import re
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
_CHOICES = f"{schema.REQUEST_PREFIX}choice.count"
#: What OpenAI's API puts before a response's id.
_OPENAI = re.compile("^(chat)?cmpl-")
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
    CALLER = "the caller not reading"


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
    """The time between two tokens of a request; ``step`` brought the second.

    ``owner``: the span id of the request, or of the one of its answers.
    """

    step: Span
    start_ns: int
    owner: str

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
    """The steps of one scheduler's process, by the end of each.

    ``tokens``: of the prompts and of the answers, by span ids of requests.
    """

    def __init__(self, steps: list[_Step], tokens: Mapping[str, tuple[float, float]]) -> None:
        self.steps = sorted(steps, key=lambda step: step.span.end_ns)
        self._ends = [step.span.end_ns for step in self.steps]
        self._tokens = tokens
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
                found.append(sum(self._prompt_of(one) + counts[one] for one in step.members) / usage)
        return statistics.median(found) if found else 0.0

    def _prompt_of(self, request: str) -> float:
        return self._tokens.get(request, (0.0, 0.0))[0]

    def holders(self, step: _Step) -> list[tuple[str, float]]:
        """Return the step's requests with the tokens that each holds in the end."""
        return [(one, max(1.0, sum(self._tokens.get(one, (0.0, 0.0))))) for one in sorted(step.members)]

    def what_was_full(
        self, step: _Step, request: str, ns: float
    ) -> tuple[Cause, float, list[tuple[str, float]]]:
        """Return why the request was not in this step, which began after it had come, ``ns``, and who was.

        The largest batch of the run is taken for the limit of running requests. An engine may keep room for
        the whole answers of those that run.
        """
        held = self.holders(step)
        taken = max(step.span.number(schema.KV_USAGE) * self._capacity, sum(tokens for _, tokens in held))
        has_room = not self._capacity or self._prompt_of(request) <= self._capacity - taken
        is_full = step.span.number(schema.BATCH_SIZE) >= self._largest_batch
        if is_full and has_room:
            return Cause.QUEUED_BATCH_FULL, ns, [(one, 1.0) for one, _ in held]
        return Cause.QUEUED_KV_ROOM, ns, held

    def ended(self, after_ns: int, until_ns: int) -> Sequence[_Step]:
        """Return the steps whose results came in this time, and the one that was under way at its end."""
        first = bisect.bisect_right(self._ends, after_ns)
        last = bisect.bisect_right(self._ends, until_ns)
        return self.steps[first : last + 1]


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
        by_process: dict[tuple[str, int], list[_Step]] = defaultdict(list)
        steps: dict[str, _Step] = {}
        prefills: list[Span] = []
        for span in spans:
            if span.name == _STEP:
                step = steps[span.trace_id] = _Step(span, frozenset(span.links))
                by_process[span.host, span.process_id].append(step)
            elif span.parent_id in self.by_id:
                self._children[span.parent_id].append(span)
                if span.name == _PREFILL:
                    prefills.append(span)
        _add_device_times(spans, steps)
        for place, found in by_process.items():
            _add_prompts(found, [span for span in prefills if (span.host, span.process_id) == place])
        self._schedulers = {place: _Scheduler(found, self._tokens()) for place, found in by_process.items()}

    def _tokens(self) -> dict[str, tuple[float, float]]:
        """Return the tokens of each prompt and of its answer. A prompt's answers share its length."""
        found = {}
        for span_id, span in self.by_id.items():
            prompt = span if schema.INPUT_TOKENS in span.attributes else self.by_id.get(span.parent_id, span)
            found[span_id] = prompt.number(schema.INPUT_TOKENS), span.number(schema.OUTPUT_TOKENS)
        return found

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

    def has_steps(self, request: Span) -> bool:
        """Return whether steps were recorded while the request was in its scheduler: they are at level 2."""
        computed = [span for span in self._phases(request) if span.name in (_PREFILL, _DECODE)]
        return bool(self._schedulers) and (
            not computed
            or any(step.span.start_ns < span.end_ns for span in computed for step in self._steps_in(span))
        )

    def explain(self, request: Span) -> Explanation:
        """Divide the request's duration among its causes; that of several answers by those it waited for."""
        found = Explanation(request)
        now, phase = request.start_ns, Cause.FRONT_END
        if self._waits_for_a_prompt(request):
            phase = Cause.HAND_OVER
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
        unread = self._unread_ns(request, now)
        found.add(Cause.CALLER, unread)
        found.add(phase if phase is not Cause.HOST else Cause.DELIVERY, request.end_ns - now - unread)
        return found

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
            for step in self._steps_in(span):
                is_first = step.span.start_ns <= span.start_ns and not step.is_decode
                if span.parent_id not in step.members or (is_first and not latest):
                    continue
                found.append(Gap(step.span, now, span.parent_id))
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
        self._add_gap(found, steps, gap.start_ns, gap.step.end_ns, Cause.DECODE, scheduler, gap.owner)
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
        names = (_TOKENIZE, _GRAMMAR, _QUEUE, *_TRANSFERS, _PREFILL, _DECODE, _DETOKENIZE)
        served = [request, *self._awaited(request)]
        found = [span for one in served for span in self._children[one.span_id] if span.name in names]
        return sorted(found, key=lambda span: (span.name == _DETOKENIZE, span.start_ns))

    def _waits_for_a_prompt(self, request: Span) -> bool:
        """Return whether it is one of several answers, sent when their prompt is in the prefix cache."""
        is_one_of_several = not request.is_server or request.number(_CHOICES) > 1
        names = {span.name for span in self._children[request.span_id]}
        return is_one_of_several and _QUEUE in names and _TOKENIZE not in names

    def _awaited(self, request: Span) -> Iterator[Span]:
        """Yield the answers that a request waited for: the last, and the one that ended before that began."""
        left = self.answers.get(request.span_id, [])
        while left:
            last = max(left, key=lambda answer: answer.end_ns)
            yield last
            left = [answer for answer in left if answer.end_ns <= last.start_ns]

    def _add_phase(self, found: Explanation, span: Span, start: int, end: int, is_preempted: bool) -> Cause:
        """Add one phase; returns the cause of what follows it until the next."""
        if is_preempted:
            scheduler = self._scheduler_of(span)
            held = [each for step in self._steps_in(span) for each in scheduler.holders(step)]
            found.add(Cause.PREEMPTED, end - start, [each for each in held if each[0] != span.parent_id])
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

    def _steps_in(self, span: Span) -> Sequence[_Step]:
        return self._scheduler_of(span).ended(span.start_ns, span.end_ns)

    def _scheduler_of(self, span: Span) -> _Scheduler:
        """Return the scheduler that wrote the span; one without steps at level 1."""
        return self._schedulers.get((span.host, span.process_id)) or _Scheduler([], {})

    def _before_batch(self, found: Explanation, span: Span, start: int, end: int, idle: Cause) -> None:
        """Divide a time before the first batch by the steps that ran; ``idle``: the cause if none did."""
        scheduler = self._scheduler_of(span)
        own, now = span.parent_id, start
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
                found.add(*scheduler.what_was_full(step, own, ended - now))
            now = ended
        found.add(idle, end - now)

    def _within_steps(self, found: Explanation, span: Span, start: int, end: int) -> None:
        """Divide a time of prefill or decode from one result of the request to the next."""
        scheduler = self._scheduler_of(span)
        own, now = span.parent_id, start
        cause = Cause.PREFILL if span.name == _PREFILL else Cause.DECODE
        pending: list[_Step] = []
        for step in scheduler.ended(start, end):
            pending.append(step)
            if own not in step.members or step.span.end_ns > end:
                continue
            self._add_gap(found, pending, now, step.span.end_ns, cause, scheduler, own)
            pending, now = [], step.span.end_ns
        if now == start and not pending:
            found.add(cause, end - now)  # level 1: no steps are known
        else:
            pending = [step for step in pending if step.span.start_ns < end]
            self._add_gap(found, pending, now, end, cause, scheduler, own)

    def _add_gap(
        self,
        found: Explanation,
        steps: list[_Step],
        start: int,
        end: int,
        cause: Cause,
        scheduler: _Scheduler,
        own: str,
    ) -> None:
        """Add a time between two results of ``own``; ``steps`` ended in it, or were under way at its end."""
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

    Those of one process add up; of the processes of a step, which work at once, the slowest counts. Only one
    replayed graph in several is timed: the others get the median of those of their size and process.
    """
    timed: dict[tuple[object, ...], list[float]] = defaultdict(list)
    passes: list[tuple[Span, tuple[object, ...]]] = []
    for span in spans:
        if span.name == schema.FORWARD.name and span.trace_id in steps:
            kind = tuple(span.attributes.get(key) for key in (schema.MODE, schema.BATCH_SIZE, schema.GRAPH))
            passes.append((span, (span.host, span.process_id, *kind)))
            if schema.DEVICE_TIME in span.attributes:
                timed[passes[-1][1]].append(span.number(schema.DEVICE_TIME))
    sums: Counter[tuple[str, str, int]] = Counter()
    usual = {kind: statistics.median(found) for kind, found in timed.items()}
    for span, kind in passes:
        is_timed = schema.DEVICE_TIME in span.attributes
        seconds = span.number(schema.DEVICE_TIME) if is_timed else usual.get(kind, span.seconds)
        sums[span.trace_id, span.host, span.process_id] += round(seconds * 1e9)
    for (trace_id, *_), ns in sums.items():
        steps[trace_id].device_ns = max(steps[trace_id].device_ns, ns)
    for step in steps.values():
        if not step.device_ns:  # level 2
            step.device_ns = step.span.end_ns - step.span.start_ns


def _names(request: Span) -> Iterator[str]:
    """Yield the ids by which the request is known."""
    for key in (schema.REQUEST_ID, schema.RESPONSE_ID, schema.HEADER_REQUEST_ID):
        value = request.attributes.get(key)
        yield from map(str, value) if isinstance(value, list) else (str(value or ""),)
    if request.is_server:
        yield request.trace_id


def _add_prompts(steps: list[_Step], prefills: list[Span]) -> None:
    """Tell the steps which prompts are in them: a chunk belongs to the step whose result ends it."""
    ordered = sorted((step for step in steps if not step.is_decode), key=lambda step: step.span.end_ns)
    ends = [step.span.end_ns for step in ordered]
    for prefill in prefills:
        owner = prefill.parent_id
        at = bisect.bisect_left(ends, prefill.end_ns)
        near = [step for step in ordered[max(0, at - 2) : at + 3] if owner in step.members]
        if near:
            closest = min(near, key=lambda step: abs(step.span.end_ns - prefill.end_ns))
            closest.prompts[owner] = closest.prompts.get(owner, 0.0) + prefill.number(schema.PREFILL_TOKENS)
