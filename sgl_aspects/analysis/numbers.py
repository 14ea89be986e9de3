"""The numbers of a run, computed from its spans."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_aspects.analysis.spans import Span, whole_of
from sgl_aspects.tracing import schema
from sgl_aspects.tracing.export.step_time import AddedTime

STEP = schema.STEP.name
#: The scheduler's names of its batches, and the phase of each. Mixed steps do some of both.
PHASES = {"extend": "prefill", "mixed": "mixed", "decode": "decode", schema.DENOISE.name: schema.DENOISE.name}


@dataclass(frozen=True)
class RequestNumbers:
    """One request. Times in seconds."""

    span: Span
    prompt_tokens: int
    output_tokens: int
    time_to_first_token: float
    #: (duration - time to first token) / tokens after the first; None for a single token, or without a first.
    time_per_output_token: float | None


@dataclass(frozen=True)
class PhaseNumbers:
    """The steps of one phase. Times in seconds, summed over the steps, each by the time that it adds."""

    phase: str
    steps: tuple[Span, ...]
    #: Tokens fed to the model.
    tokens: int
    step_seconds: float
    forward_seconds: float

    @property
    def forward_share(self) -> float:
        """The fraction of the steps' time in the model's forward pass, 0 to 1."""
        return self.forward_seconds / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True)
class RunReport:
    """A run: its requests and its steps by phase. Times in seconds."""

    requests: tuple[RequestNumbers, ...]
    phases: tuple[PhaseNumbers, ...]
    #: From the first request's receipt to the last one's end.
    seconds: float

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def forward_share(self) -> float:
        """The fraction of the steps' time in the model's forward pass, 0 to 1."""
        step_seconds = sum(phase.step_seconds for phase in self.phases)
        forward_seconds = sum(phase.forward_seconds for phase in self.phases)
        return forward_seconds / step_seconds if step_seconds else 0.0


def report_run(spans: Sequence[Span]) -> RunReport:
    """Compute the demo's numbers of a run. Empty without requests among the spans."""
    requests = tuple(numbers_of(span) for span in spans if span.is_server)
    seconds = 0.0
    if requests:
        first = min(request.span.start_ns for request in requests)
        seconds = (max(request.span.end_ns for request in requests) - first) / 1e9
    return RunReport(requests, report_phases(spans, [s for s in spans if s.name == STEP]), seconds)


def report_phases(spans: Sequence[Span], steps: Sequence[Span]) -> tuple[PhaseNumbers, ...]:
    """Return ``steps`` by phase, with the time of their forward passes among ``spans``."""
    passes: dict[str, Counter[tuple[str, tuple[str, int]]]] = defaultdict(Counter)
    for span in spans:
        if span.name == "forward":  # in its step's trace, which has no other spans
            passes[span.trace_id][span.pass_of] += span.end_ns - span.start_ns
    forward_seconds = {trace_id: whole_of(found) / 1e9 for trace_id, found in passes.items()}
    times = AddedTime()
    added = {
        step.span_id: times.of(step.place, step.start_ns, step.end_ns) / 1e9
        for step in sorted(steps, key=lambda step: step.end_ns)
    }
    by_mode: dict[str, list[Span]] = {mode: [] for mode in PHASES}
    for step in steps:
        by_mode.setdefault(str(step.attributes.get(schema.MODE, "unknown")), []).append(step)
    return tuple(
        PhaseNumbers(
            phase=PHASES.get(mode, mode),
            steps=tuple(found),
            tokens=int(sum(step.number(schema.BATCH_TOKENS) for step in found)),
            step_seconds=sum(added[step.span_id] for step in found),
            forward_seconds=sum(forward_seconds.get(step.trace_id, 0.0) for step in found),
        )
        for mode, found in by_mode.items()
        if found
    )


def numbers_of(span: Span) -> RequestNumbers:
    """Read a request's numbers off its span."""
    output_tokens = int(span.number(schema.OUTPUT_TOKENS))
    first = span.number(schema.TIME_TO_FIRST_TOKEN)
    is_known = output_tokens > 1 and schema.TIME_TO_FIRST_TOKEN in span.attributes
    per_token = max(0.0, span.seconds - first) / (output_tokens - 1) if is_known else None
    prompt_tokens = int(span.number(schema.INPUT_TOKENS))
    return RequestNumbers(span, prompt_tokens, output_tokens, first, per_token)
