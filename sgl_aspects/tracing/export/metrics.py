"""Metrics of an engine, made from the records of its processes by the OpenTelemetry metrics SDK.

Nothing here runs in the engine: the collector passes on what it reads. A request is counted when it ends,
sampled or not; a step reports the scheduler's state at its end. docs/tracing.md has the table.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from sgl_aspects import compat
from sgl_aspects.tracing import schema
from sgl_aspects.tracing.export.step_time import AddedTime
from sgl_aspects.tracing.records import AttributeValue, Latest, RequestBegin, SpanEnd, encodable

_USAGE = tuple(4**power for power in range(14))
# Boundaries from the conventions, in seconds and in tokens; for steps from a fraction of a millisecond to the
# seconds of a long prompt.
_HISTOGRAMS: tuple[tuple[str, str, str, Sequence[float]], ...] = (
    (
        schema.REQUEST_DURATION,
        "s",
        "How long a request took, however it ended.",
        (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    ),
    (
        schema.SERVER_TIME_TO_FIRST_TOKEN,
        "s",
        "Time to the first token of successful answers, queue and prefill included.",
        (*(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1), *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)),
    ),
    (
        schema.TIME_PER_OUTPUT_TOKEN,
        "s",
        "Time per token after the first, of successful answers.",
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
    (
        schema.INTER_TOKEN_LATENCY,
        "s",
        "Time between two tokens of a request, each one, from the scheduler's steps.",
        (
            *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04),
            *(0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
        ),
    ),
    (schema.TOKEN_USAGE, "{token}", "Tokens of a request, by type.", _USAGE),
    (
        schema.STEP_DURATION,
        "s",
        "Time that a scheduler's step adds: two may be open at once.",
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    ),
)
_COUNTERS = (
    (schema.TOKENS, "{token}", "Tokens of ended requests."),
    (schema.JUDGED, "{request}", "Requests by whether they kept the latency targets."),
    (schema.CACHE_HIT_TOKENS, "{token}", "Prompt tokens found in the prefix cache."),
    (schema.DRAFTED_TOKENS, "{token}", "Tokens drafted for requests."),
    (schema.ACCEPTED_TOKENS, "{token}", "Drafted tokens accepted."),
    (schema.STEP_TOKENS, "{token}", "Tokens fed to the model."),
)

#: The span type whose records report the scheduler's state.
STEP = schema.STEP.name
#: The one whose records have drafted and accepted tokens.
DECODE = schema.DECODE.name
_MODE = schema.MODE
_TOKENS = schema.BATCH_TOKENS
_GAUGES = (
    (schema.QUEUE_RUNNING, "{request}", "Requests that the scheduler is running."),
    (schema.QUEUE_WAITING, "{request}", "Requests waiting to be scheduled."),
    (schema.KV_USAGE, "1", "Share of the key-value cache that is in use."),
    (schema.BATCH_SIZE, "{request}", "Requests in the latest batch; 0 when idle."),
)
_OF_REQUEST = (
    schema.OPERATION,
    schema.PROVIDER,
    schema.SYSTEM,
    schema.REQUEST_MODEL,
    schema.RESPONSE_MODEL,
)


#: Attributes of an amount, by which what is kept for them is found.
_Labels: TypeAlias = "tuple[tuple[str, str], ...]"
# Cap on kept combinations of a histogram and attributes.
_MOST_KEPT = 1000
_EXEMPLAR_SECONDS = 1.0
# Cap on tenants that have a label of their own.
_MOST_TENANTS = 50


class _Counter:
    """A counter summed here and read at export: the SDK's own sum takes thirty times as long."""

    def __init__(self, meter: Meter, name: str, unit: str, description: str) -> None:
        self._sums: dict[_Labels, float] = {}
        meter.create_observable_counter(name, [self._read], unit, description)

    def add(self, amount: float, labels: _Labels) -> None:
        self._sums[labels] = self._sums.get(labels, 0) + amount

    def _read(self, options: CallbackOptions) -> Iterable[Observation]:
        return [Observation(amount, dict(labels)) for labels, amount in list(self._sums.items())]


class EngineMetrics:
    """The instruments. Updated by one thread; exporters read them in theirs."""

    def __init__(self, meter: Meter, targets: tuple[float | None, float | None] = (None, None)) -> None:
        """``targets``: seconds to the first token, and between tokens; None: no target."""
        self._meter = meter
        self._targets = targets
        self._histograms = {
            name: meter.create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=boundaries)
            for name, unit, text, boundaries in _HISTOGRAMS
        }
        self._boundaries = {name: boundaries for name, *_, boundaries in _HISTOGRAMS}
        self._counters = {name: _Counter(meter, name, unit, text) for name, unit, text in _COUNTERS}
        self._tenants: set[str] = set()
        #: When an amount in a bucket of a histogram was kept with its trace.
        self._kept: dict[tuple[str, int], float] = {}
        self._recorders: Latest[tuple[str, _Labels], Callable[[float], None]] = Latest(_MOST_KEPT)
        self._added = AddedTime()
        self._followers: set[str] = set()
        # By writer: its process and the figures of its latest step.
        self._states: dict[str, tuple[int, dict[str, AttributeValue]]] = {}
        for name, unit, description in _GAUGES:
            meter.create_observable_gauge(name, [self._reading_of(name)], unit, description)

    def _is_exemplar(self, histogram: str, amount: float) -> bool:
        """Choose the amounts whose trace is kept beside them: one a second for each bucket of a histogram.

        With a context an amount costs OpenTelemetry's SDK ten times as long.
        """
        bucket = histogram, bisect.bisect_left(self._boundaries[histogram], amount)
        now = time.monotonic()
        is_wanted = now - self._kept.get(bucket, -_EXEMPLAR_SECONDS) >= _EXEMPLAR_SECONDS
        if is_wanted:
            self._kept[bucket] = now
        return is_wanted

    def decode_ended(self, end: SpanEnd) -> None:
        """Count the drafts of a decode phase, if its engine speculates."""
        values = dict(zip(end.type.attributes, end.values))
        drafted, accepted = (
            _number(values, name) for name in (schema.DRAFTED_TOKENS, schema.ACCEPTED_TOKENS)
        )
        if drafted is None or accepted is None:
            return
        self._counters[schema.DRAFTED_TOKENS].add(drafted, ())
        found: Any = values.get(schema.ACCEPTED_AT)
        counts = dict(enumerate(found if isinstance(found, list) else [accepted]))
        for position in counts:
            if (count := _number(counts, position)) is not None:
                self._counters[schema.ACCEPTED_TOKENS].add(count, ((schema.POSITION, str(position)),))

    def request_ended(self, begin: RequestBegin, end: SpanEnd, first_token_ns: int) -> None:
        """Count an ended request. ``first_token_ns``: the scheduler's (0: none), for non-streamed answers."""
        known = zip(end.type.attributes, end.values)
        values = {**begin.attributes, **{name: value for name, value in known if value is not None}}
        common: _Labels = tuple(
            (name, encodable(str(values[name]))) for name in _OF_REQUEST if values.get(name) is not None
        )
        if (tenant := values.get(schema.TENANT)) is not None:
            common += ((schema.TENANT, self._label_of(str(tenant))),)
        duration = max(0, end.end_ns - begin.start_ns) / 1e9
        named = (*common, (schema.ERROR_TYPE, end.error)) if end.error else common
        of_trace = (begin.trace_id, begin.span_id) if begin.sampled else None
        self._record(schema.REQUEST_DURATION, duration, named, of_trace)
        prompt, output = (_number(values, name) for name in (schema.INPUT_TOKENS, schema.OUTPUT_TOKENS))
        for kind, count in (("input", prompt), ("output", output)):
            if count is not None:
                labels = (*common, (schema.TOKEN_TYPE, kind))
                self._record(schema.TOKEN_USAGE, count, labels)
                self._counters[schema.TOKENS].add(count, labels)
        cached = _number(values, schema.CACHED_TOKENS)
        if cached is not None:
            self._counters[schema.CACHE_HIT_TOKENS].add(cached, common)
        first = _number(values, schema.TIME_TO_FIRST_TOKEN)
        if first is None and first_token_ns:
            first = (first_token_ns - begin.start_ns) / 1e9
        per_token = None
        if first is not None and output is not None and output > 1:
            per_token = max(0.0, duration - first) / (output - 1)
        self._judge(values, end.error, (first, per_token), common)
        if end.error or first is None or first < 0:
            return
        self._record(schema.SERVER_TIME_TO_FIRST_TOKEN, first, common, of_trace)
        if per_token is not None:
            self._record(schema.TIME_PER_OUTPUT_TOKEN, per_token, common, of_trace)

    def _judge(
        self, values: Mapping[str, Any], error: str, times: tuple[float | None, ...], labels: _Labels
    ) -> None:
        """Count whether it kept the targets: a failed one did not, and callers' mistakes are left out."""
        if self._targets == (None, None) or 400 <= (_number(values, schema.STATUS_CODE) or 0) < 500:
            return
        late = any(
            seconds is not None and target is not None and seconds > target
            for seconds, target in zip(times, self._targets)
        )
        self._counters[schema.JUDGED].add(
            1, (*labels, (schema.KEPT_TARGETS, "false" if error or late else "true"))
        )

    def _label_of(self, tenant: str) -> str:
        """Return the tenant, or for all beyond the first ones the same word: a label has few values."""
        if len(self._tenants) < _MOST_TENANTS:
            self._tenants.add(tenant)
        return tenant if tenant in self._tenants else "other"

    def token_came(self, gap_ns: int, of_trace: tuple[int, int] | None) -> None:
        """Count the time since the same request's token before."""
        self._record(schema.INTER_TOKEN_LATENCY, gap_ns / 1e9, (), of_trace)

    def _record(
        self,
        name: str,
        amount: float,
        labels: _Labels,
        of_trace: tuple[int, int] | None = None,
    ) -> None:
        """Record an amount. ``of_trace``: the trace id and span id of its exemplar."""
        if of_trace is not None and self._is_exemplar(name, amount):
            self._histograms[name].record(amount, dict(labels), _context_of(*of_trace))
            return
        key = name, labels
        record = self._recorders.get(key)
        if record is None:
            record = self._recorders[key] = compat.histogram_recorder(self._histograms[name], dict(labels))
        record(amount)

    def step_ended(self, writer: str, process_id: int, step: SpanEnd, *, is_counted: bool = False) -> None:
        """Count a step, or (without a mode) an idle scheduler. ``is_counted``: it was before a restart."""
        if writer in self._followers:
            return
        values = dict(zip(step.type.attributes, step.values))
        self._states[writer] = process_id, values
        added_ns = self._added.of(writer, step.start_ns, step.end_ns)
        mode = values.get(_MODE)
        if mode is None or is_counted:
            return
        labels: _Labels = ((_MODE, str(mode)),)
        if step.error:
            labels += ((schema.ERROR_TYPE, step.error),)
        self._record(schema.STEP_DURATION, added_ns / 1e9, labels)
        tokens = _number(values, _TOKENS)
        if tokens is not None:
            self._counters[schema.STEP_TOKENS].add(tokens, labels)

    def follow(self, writer: str) -> None:
        """Count no step of a rank that runs another one's batches."""
        self.writer_gone(writer)
        self._followers.add(writer)

    def writer_gone(self, writer: str) -> None:
        """Remove the gauges of a process that has ended."""
        self._states.pop(writer, None)
        self._added.forget(writer)

    def count(self, name: str, unit: str, description: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Add a counter kept elsewhere: ``read`` returns its values by exporter; "" is for all."""

        def observe(options: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(value, {schema.EXPORTER: key} if key else {}) for key, value in read().items()
            ]

        self._meter.create_observable_counter(name, [observe], unit, description)

    def _reading_of(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            found = [
                (process_id, _number(values, name)) for process_id, values in list(self._states.values())
            ]
            return [
                Observation(value, {"process.pid": process_id})
                for process_id, value in found
                if value is not None
            ]

        return observe


def _context_of(trace_id: int, span_id: int) -> Context:
    span = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(span), Context())


def _number(values: Mapping[Any, Any], name: object) -> float | None:
    """Return a number that a counter accepts; None for an absent or damaged one."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1 << 63:
        return None
    return value
