"""The steps of each scheduler of a run: what was in them, what was full, and how long the device took."""

from __future__ import annotations

import bisect
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sgl_aspects.analysis.spans import Span, whole_of
from sgl_aspects.tracing import schema

#: The scheduler's mode of a batch in which each request gets its next token.
_DECODING = "decode"
#: With less, the KV cache tells nothing about its size.
_LEAST_USAGE = 0.05
#: Steps of one scheduler that may be under way at once.
_IN_FLIGHT = 16
_STOPPING = {one.name for one in schema.PREPARATIONS.values()}
#: What ends a stop, by what begins it.
_ENDS = {
    schema.PREPARATIONS[role].name: schema.PREPARATIONS[end].name
    for role, end in (("pause", "resume"), ("sleep", "wake_up"))
}
_PHASES = {*schema.PHASES, schema.PREFILL.name}


@dataclass
class Step:
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


class Scheduler:
    """The steps of one scheduler's process, by the end of each.

    ``tokens``: of the prompts and of the answers, by span ids of requests. ``stops``: when it was stopped.
    """

    def __init__(
        self,
        steps: list[Step],
        tokens: Mapping[str, tuple[float, float]],
        stops: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.steps = sorted(steps, key=lambda step: step.span.end_ns)
        self._ends = [step.span.end_ns for step in self.steps]
        self._tokens, self._stops = tokens, stops
        self._largest_batch = max((step.span.number(schema.BATCH_SIZE) for step in steps), default=0.0)

    @cached_property
    def usual_decode_ns(self) -> float:
        return statistics.median([step.device_ns for step in self.steps if step.is_decode] or [0.0])

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

    def holders(self, step: Step) -> list[tuple[str, float]]:
        """Return the step's requests with the tokens that each holds in the end."""
        return [(one, max(1.0, sum(self._tokens.get(one, (0.0, 0.0))))) for one in sorted(step.members)]

    def was_batch_full(self, step: Step, request: str) -> bool:
        """Return whether the batch kept the request out of this step, which began after it had come.

        Otherwise the KV cache did. The largest batch of the run is taken for the limit of running requests.
        An engine may keep room for the whole answers of those that run.
        """
        held = self.holders(step)
        taken = max(step.span.number(schema.KV_USAGE) * self._capacity, sum(tokens for _, tokens in held))
        has_room = not self._capacity or self._prompt_of(request) <= self._capacity - taken
        return has_room and step.span.number(schema.BATCH_SIZE) >= self._largest_batch

    def stopped_ns(self, start_ns: float, end_ns: float, *, is_running: bool = False) -> float:
        """Return how much of this time it was stopped; for a running request, after the steps that go on."""
        stops = self._halts if is_running else self._stops
        return sum(max(0, min(end, end_ns) - max(start, start_ns)) for start, end in stops)

    @cached_property
    def _halts(self) -> list[tuple[float, float]]:
        ends = [0, *self._ends]
        return [(max(start, ends[bisect.bisect_right(ends, end) - 1]), end) for start, end in self._stops]

    def ended(self, after_ns: int, until_ns: int) -> Sequence[Step]:
        """Return the steps whose results came in this time, and the one that was under way at its end."""
        first = bisect.bisect_right(self._ends, after_ns)
        last = bisect.bisect_right(self._ends, until_ns)
        return self.steps[first : last + 1]

    def around(self, forward: Span, step: Step) -> list[str]:
        """Return the traces of steps whose batch another rank's ``step``, with this pass, may have run."""
        middle = (forward.start_ns + forward.end_ns) // 2
        first = bisect.bisect_left(self._ends, middle)
        return [
            own.span.trace_id
            for own in self.steps[first : first + _IN_FLIGHT]
            if own.span.start_ns <= middle
            and own.is_decode is step.is_decode
            and not own.members.isdisjoint(step.members)
        ]


def schedulers_of(spans: Sequence[Span], requests: Mapping[str, Span]) -> dict[tuple[str, int], Scheduler]:
    """Return a run's schedulers by host and process. ``requests``: and answers, by span id.

    Of ranks that run the same requests, the one that writes their phases: its steps have the others' passes.
    """
    phases = [span for span in spans if span.name in _PHASES and span.parent_id in requests]
    answering = {span.parent_id: span.place for span in phases}
    by_place: dict[tuple[str, int], list[Step]] = defaultdict(list)
    others: dict[str, tuple[tuple[str, int], Step]] = {}
    for span in spans:
        if span.name == schema.STEP.name:
            step = Step(span, frozenset(span.links))
            place = next((answering[one] for one in step.members if one in answering), span.place)
            if place == span.place:
                by_place[place].append(step)
            else:
                others[span.trace_id] = place, step
    for place in {step.span.place for _, step in others.values()} - {*answering.values()}:
        by_place.pop(place, None)  # a rank that follows: its steps without a sampled request
    prefills: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in phases:
        if span.name == schema.PREFILL.name:
            prefills[span.place].append(span)
    tokens = _tokens(requests)
    for place, found in by_place.items():
        _add_prompts(found, prefills[place])
    stops = _stops(spans)
    schedulers = {place: Scheduler(found, tokens, stops[place]) for place, found in by_place.items()}
    _add_device_times([span for span in spans if span.name == schema.FORWARD.name], schedulers, others)
    return schedulers


def _stops(spans: Sequence[Span]) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Return when processes were paused, asleep, or given new weights and the like; one that was put to sleep
    is paused, too, and woken in part it still is.
    """
    parts: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    begun: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
    for span in sorted((one for one in spans if one.name in _STOPPING), key=lambda one: one.start_ns):
        if (by := _ENDS.get(span.name)) is not None:
            begun[span.place].setdefault(by, span.start_ns)
        else:
            parts[span.place].append((begun[span.place].pop(span.name, span.start_ns), span.end_ns))
    found: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for place in begun:
        for start, end in sorted([*parts[place], *((since, math.inf) for since in begun[place].values())]):
            is_within = found[place] and start <= found[place][-1][1]
            since, until = found[place].pop() if is_within else (start, end)
            found[place].append((since, max(until, end)))
    return found


def _tokens(requests: Mapping[str, Span]) -> dict[str, tuple[float, float]]:
    """Return the tokens of each prompt and of its answer. A prompt's answers share its length."""
    found = {}
    for span_id, span in requests.items():
        prompt = span if schema.INPUT_TOKENS in span.attributes else requests.get(span.parent_id, span)
        found[span_id] = prompt.number(schema.INPUT_TOKENS), span.number(schema.OUTPUT_TOKENS)
    return found


def _add_device_times(
    passes: Sequence[Span],
    schedulers: Mapping[tuple[str, int], Scheduler],
    others: Mapping[str, tuple[tuple[str, int], Step]],
) -> None:
    """Give each step the time of its forward passes: on the device if known, else on the host.

    ``whole_of`` a step's. Only one replayed graph in several is timed: the others get the median of those of
    their size and process. ``others``: the steps of other ranks, with the place of the one that answers.
    """
    timed: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for span in passes:
        if schema.DEVICE_TIME in span.attributes:
            timed[_kind(span)].append(span.number(schema.DEVICE_TIME))
    usual = {kind: statistics.median(found) for kind, found in timed.items()}
    sums: dict[str, Counter[tuple[str, tuple[str, int]]]] = defaultdict(Counter)
    wholes: dict[str, str] = {}
    for span in passes:
        trace = span.trace_id
        if trace in others and trace not in wholes:
            owner, step = others[trace]
            near = schedulers[owner].around(span, step) if owner in schedulers else ()
            wholes[trace] = next((one for one in near if span.pass_of not in sums[one]), "")
        seconds = span.number(schema.DEVICE_TIME, usual.get(_kind(span), span.seconds))
        sums[wholes.get(trace, trace)][span.pass_of] += round(seconds * 1e9)
    for step in (step for scheduler in schedulers.values() for step in scheduler.steps):
        whole = whole_of(sums[step.span.trace_id])
        step.device_ns = whole or step.span.end_ns - step.span.start_ns  # level 2: no passes


def _kind(forward: Span) -> tuple[object, ...]:
    named = (schema.MODE, schema.BATCH_SIZE, schema.GRAPH)
    return (*forward.place, *(str(forward.attributes.get(key)) for key in named))


def _add_prompts(steps: list[Step], prefills: list[Span]) -> None:
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
