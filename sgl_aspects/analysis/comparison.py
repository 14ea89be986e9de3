"""Two runs compared, like for like: what takes longer or shorter in the second, by how much, how surely.

Durations are compared among requests and steps of the same kind (mode, batch size, tokens), as ratios; causes
by the share of the first run's latency that each gained or lost. What follows in time depends on what went
before, so a run's samples are taken in blocks, and the intervals are those of the blocks. They hold for all
measures of a comparison at once (Bonferroni): of twenty pairs of equal runs about one has a false alarm.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgl_aspects.analysis.causes import Cause, Causes
from sgl_aspects.analysis.numbers import PHASES, STEP, numbers_of
from sgl_aspects.analysis.spans import Span
from sgl_aspects.tracing import schema

#: The chance of a false alarm in a comparison.
_ALPHA = 0.05
_BLOCKS = 16
# With fewer samples, an interval would say nothing.
_LEAST_SAMPLES = 20
# The middle part of the values that a mean is taken of: single stalls say nothing about the rest.
_KEPT = 0.6
# Batches whose sizes differ by less than a twelfth are alike; requests by less than a half.
_SIZES_PER_DOUBLING, _LENGTHS_PER_DOUBLING = 8, 2


class Sample(NamedTuple):
    """One value of a measure, in seconds; only those of the same ``kind`` are compared with it."""

    kind: tuple[object, ...]
    seconds: float


@dataclass(frozen=True)
class Change:
    """One measure in both runs.

    ``before``, ``after``: medians of durations, means of causes, in seconds. ``share``: the change, as a
    share of the duration before, or of the mean latency before for a cause; ``low``, ``high``: its interval.
    """

    measure: str
    before: float
    after: float
    share: float
    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        """Return whether the interval lies on one side of zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Measures:
    """What a run is compared by: samples by measure, and each request's seconds by cause, in time's order."""

    durations: Mapping[str, Sequence[Sample]]
    causes: Sequence[Mapping[Cause, float]]

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Measures:
        """Take the measures of a run; requests that failed are left out."""
        causes = Causes(spans)
        explained = [causes.explain(request).seconds for request in causes.requests if not request.is_error]
        return cls(_durations(spans, causes), explained)


def compare(before: Measures, after: Measures) -> list[Change]:
    """Return the change of each measure that both runs have enough samples of: the surest first."""
    found: list[tuple[str, Sequence[Sample], Sequence[Sample], float | None]] = [
        (measure, samples, after.durations.get(measure, ()), None)
        for measure, samples in before.durations.items()
    ]
    sides = (before.causes, after.causes)
    if before.causes:
        latency = statistics.fmean(sum(seconds.values()) for seconds in before.causes)
        for cause in dict.fromkeys(cause for side in sides for seconds in side for cause in seconds):
            one, other = ([Sample((), seconds.get(cause, 0.0)) for seconds in side] for side in sides)
            found.append((f"cause: {cause.value}", one, other, latency))
    found = [each for each in found if min(len(each[1]), len(each[2])) >= _LEAST_SAMPLES]
    alpha = _ALPHA / max(1, len(found))
    changes = [_change(measure, one, other, whole, alpha) for measure, one, other, whole in found]
    return sorted(filter(None, changes), key=lambda each: -abs(each.share) / max(1e-9, each.high - each.low))


def regressions(changes: Iterable[Change], share: float) -> list[Change]:
    """Return the changes for the worse that are certain and larger than ``share``."""
    return [each for each in changes if each.low > 0 and each.share > share]


def _change(
    measure: str, before: Sequence[Sample], after: Sequence[Sample], whole: float | None, alpha: float
) -> Change | None:
    """Compare one measure; ``whole``: for a cause, the latency of which it is a part."""
    typical: Callable[[Sequence[float]], float] = statistics.median if whole is None else statistics.fmean
    if whole is None:
        logs = [
            [Sample(kind, math.log(max(seconds, 1e-9))) for kind, seconds in each] for each in (before, after)
        ]
    else:
        logs = [[Sample((), seconds / whole) for _, seconds in each] for each in (before, after)]
    estimated = _difference(*logs)
    if estimated is None:
        return None
    difference, error, freedom = estimated
    reach = error * _quantile(1 - alpha / 2, freedom)
    low, high = difference - reach, difference + reach
    if whole is None:
        low, difference, high = (math.expm1(value) for value in (low, difference, high))
    was, became = (typical([each.seconds for each in samples]) for samples in (before, after))
    return Change(measure, was, became, difference, low, high)


def _difference(before: Sequence[Sample], after: Sequence[Sample]) -> tuple[float, float, float] | None:
    """Return the difference of the typical values within kinds, its standard error, and the error's freedom.

    Each value is taken relative to the median of its kind in both runs; a side's typical value is the mean
    without the lowest and the highest fifth, weighted so that both sides have the same kinds.
    """
    sides = (before, after)
    counts = [Counter(kind for kind, _ in samples) for samples in sides]
    shared = counts[0].keys() & counts[1].keys()
    values: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for kind, value in itertools.chain(*sides):
        values[kind].append(value)
    medians = {kind: statistics.median(values[kind]) for kind in shared}
    difference, variance, parts = 0.0, 0.0, []
    for sign, samples, own, others in zip((-1, 1), sides, counts, reversed(counts)):
        found = [
            (value - medians[kind], others[kind] / (own[kind] + others[kind]), own[kind] + others[kind])
            for kind, value in samples
            if kind in shared
        ]
        total = sum(weight for _, weight, _ in found)
        if total < _LEAST_SAMPLES / 2:
            return None
        low, high = _bounds(found, total)
        kept = [(value, weight) for value, weight, _ in found if low <= value <= high]
        typical = sum(value * weight for value, weight in kept) / sum(weight for _, weight in kept)
        difference += sign * typical
        # What each value moves the mean by: beyond the bounds no more than at them.
        pulls = []
        for value, weight, of_kind in found:
            moved = (min(max(value, low), high) - typical) * weight / total / _KEPT
            pulls.append(moved * math.sqrt(of_kind / (of_kind - 1)))
        blocks = min(_BLOCKS, len(pulls) // 2)
        edges = [len(pulls) * at // blocks for at in range(blocks + 1)]
        sums = [sum(pulls[begin:end]) for begin, end in itertools.pairwise(edges)]
        middle = statistics.fmean(sums)
        by_block = sum((each - middle) ** 2 for each in sums) * blocks / (blocks - 1)
        parts.append((max(by_block, sum(each * each for each in pulls)), blocks - 1))
    variance = sum(each for each, _ in parts)
    freedom = variance**2 / sum(each**2 / degrees for each, degrees in parts) if variance else 1.0
    return difference, math.sqrt(variance), freedom


def _bounds(found: Sequence[tuple[float, float, int]], total: float) -> tuple[float, float]:
    """Return the values between which the middle ``_KEPT`` of the weight lies."""
    ordered = sorted(found)
    outside, passed = (1 - _KEPT) / 2 * total, 0.0
    low = high = ordered[0][0]
    for value, weight, _ in ordered:
        if passed <= outside:
            low = value
        passed += weight
        if passed <= total - outside:
            high = value
    return low, max(low, high)


def _quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's distribution, by its expansion around the normal one."""
    z = statistics.NormalDist().inv_cdf(probability)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _durations(spans: Sequence[Span], causes: Causes) -> Mapping[str, Sequence[Sample]]:
    """Return samples by measure, in time's order: of requests, their phases, steps, and operators."""
    found: dict[str, list[Sample]] = defaultdict(list)
    size_of: dict[str, tuple[object, ...]] = {}
    for request in map(numbers_of, causes.requests):
        if request.span.is_error:
            continue
        lengths = (request.prompt_tokens, request.output_tokens)
        prompt, output = (_size(tokens, _LENGTHS_PER_DOUBLING) for tokens in lengths)
        size_of[request.span.trace_id] = (prompt, output)
        found["latency of requests"].append(Sample((prompt, output), request.span.seconds))
        if request.time_to_first_token:
            found["time to first token"].append(Sample((prompt,), request.time_to_first_token))
        if request.time_per_output_token is not None:
            found["time per output token"].append(Sample((output,), request.time_per_output_token))
    steps = {span.trace_id: _kind(span) for span in spans if span.name == STEP}
    for span in sorted(spans, key=lambda span: span.end_ns):
        if span.trace_id in size_of:
            if span.name in (schema.TOKENIZE.name, schema.DETOKENIZE.name):
                seconds = span.number(schema.DETOKENIZE_BUSY_TIME, span.seconds)
                found[f"{span.name} of requests"].append(Sample(size_of[span.trace_id], seconds))
        elif span.trace_id in steps and span.name not in (STEP, schema.RUN_BATCH.name):
            kind = steps[span.trace_id]
            seconds = span.number(schema.DEVICE_TIME, span.seconds)
            operator = span.attributes.get(schema.OPERATOR_NAME)
            name = f"{span.name} {operator}" if operator and operator != span.name else span.name
            graph, shape = (str(span.attributes.get(key)) for key in (schema.GRAPH, schema.SHAPE))
            found[f"{name}, {kind[0]}"].append(Sample((*kind, graph, shape), seconds))
    for step in sorted(causes.steps(), key=lambda step: step.end_ns):
        found[f"step, {_kind(step)[0]}"].append(Sample(_kind(step), step.seconds))
    return found


def _kind(step: Span) -> tuple[object, ...]:
    mode = str(step.attributes.get(schema.MODE, "unknown"))
    sizes = (step.number(schema.BATCH_SIZE), step.number(schema.BATCH_TOKENS))
    return PHASES.get(mode, mode), *map(_size, sizes)


def _size(tokens: float, per_doubling: int = _SIZES_PER_DOUBLING) -> int:
    return round(per_doubling * math.log2(tokens)) if tokens >= 1 else -1
