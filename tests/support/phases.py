"""The rule of phases, for every request of any engine: they never overlap, they lie within the request, and
their tokens add up to the usage of the response.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.support.engine_server import Answer
from tests.support.otlp_receiver import Receiver, Span, http_receiver

PHASES = (
    *("grammar", "bootstrap", "kv_transfer", "queue", "prefill", "decode"),
    *("encode", "denoise", "decode_latents"),  # of an image
)
#: A request that was seen in part, or has no usage.
_IN_PART = ("error.type", "sgl_aspects.attached", "sgl_aspects.detached")


@contextmanager
def engine_receiver() -> Iterator[Receiver]:
    """A backend for a real engine; at its end every request must follow the rule."""
    with http_receiver() as receiver:
        yield receiver
    found = violations(receiver.spans)
    assert not found, "\n".join(found)


def run_prefix(receiver: Receiver, level: int) -> list[str]:
    """Return what stands before an engine's command that is traced to ``receiver``."""
    command = [sys.executable, "-m", "sgl_aspects", "run", "--level", str(level)]
    return [*command, "--endpoint", receiver.endpoint, "--"]


def violations(spans: Iterable[Span]) -> list[str]:
    """Return what breaks the rule, a line each."""
    below: dict[tuple[str, str], list[Span]] = {}
    every = sorted(spans, key=lambda span: (span.start, span.end))
    for span in every:
        below.setdefault((span.trace_id, span.parent_id), []).append(span)
    requests = [span for span in every if "gen_ai.request.id" in span.attributes]
    return [
        f"{request.name} {request.attributes['gen_ai.request.id']}: {what}"
        for request in requests
        if (children := below.get((request.trace_id, request.span_id), []))
        if (phases := [span for span in children if span.name in PHASES])
        for what in _violations(request, phases, children)
    ]


def _violations(request: Span, phases: list[Span], others: list[Span]) -> Iterator[str]:
    for early, late in itertools.pairwise(phases):
        if late.start < early.end:
            yield f"{late.name} begins {early.end - late.start} ns before {early.name} ends"
    if any(name in request.attributes for name in _IN_PART):
        return
    if phases[0].start < request.start:
        yield f"{phases[0].name} begins {request.start - phases[0].start} ns before the request"
    # A prefill server of vLLM's answers at the end of the prompt; its keys and values are fetched later.
    if phases[-1].end > request.end and not _is_stopped(phases[-1]) and phases[-1].name != "kv_transfer":
        yield f"{phases[-1].name} ends {phases[-1].end - request.end} ns after the request"
    yield from _wrong_tokens(request, phases)
    if phases[0].name in ("queue", "grammar", "bootstrap"):
        tokenized = [span.end for span in others if span.name == "tokenize"]
        waited = (phases[0].start - max(tokenized, default=request.start)) / 1e9
        recorded = request.attributes.get("sgl_aspects.latency.time_to_queue", -1)
        if abs(recorded - max(waited, 0)) > 1e-6:
            yield f"it waited {waited} s for {phases[0].name}, its attribute has {recorded}"
    recorded = request.attributes.get("gen_ai.latency.time_in_model_prefill", 0.0)
    lasted = sum(span.end - span.start for span in phases if span.name == "prefill") / 1e9
    if abs(recorded - lasted) > 1e-6:
        yield f"its attribute has {recorded} s of prefill, its phases have {lasted}"


def _is_stopped(decode: Span) -> bool:
    """Return whether its server stopped it, for a text that the scheduler does not see: it may have made more
    tokens, also after the answer.
    """
    return decode.attributes.get("sgl_aspects.finish_reason") == "abort"


def _wrong_tokens(request: Span, phases: list[Span]) -> Iterator[str]:
    usage = [request.attributes.get(f"gen_ai.usage.{name}_tokens") for name in ("input", "output")]
    cached = request.attributes.get("gen_ai.usage.cache_read.input_tokens")
    decodes = [span for span in phases if span.name == "decode"]
    is_stopped = any(map(_is_stopped, decodes))
    made: list[Any] = [span.attributes.get("gen_ai.usage.output_tokens") for span in decodes]
    if decodes and not is_stopped and usage[1] is not None and None not in made and sum(made) != usage[1]:
        yield f"{made} tokens in its phases of decoding, {usage[1]} in its usage"
    before = list(itertools.takewhile(lambda span: span.name != "decode", phases))
    fed = [span.attributes["sgl_aspects.prefill.tokens"] for span in before if span.name == "prefill"]
    # Preempted before its first token, it begins its prompt again.
    is_first = sum(span.name == "queue" for span in before) < 2
    if not (fed and decodes and is_first) or usage[0] is None:
        return
    # What an engine found in its cache without counting it is not known.
    if sum(fed) + (cached or 0) > usage[0] or (cached is not None and sum(fed) + cached != usage[0]):
        yield f"{fed} tokens in its chunks and {cached} cached ones, {usage[0]} in its usage"


def assert_first_tokens_as_seen(requests: Sequence[tuple[Span, Answer]], median_ms: float) -> None:
    """Check the recorded times to the first token against those that the clients measured.

    The kernel reports arrivals in ticks of up to 4 ms, and on a busy machine single clients read later than
    they were answered: most differ by at most a tick or a small part, half by ``median_ms``.
    """
    differences, off = [], 0
    for root, answer in requests:
        recorded = root.attributes["gen_ai.latency.time_to_first_token"]
        differences.append(round(answer.late_ms(recorded), 1))
        off += abs(differences[-1]) > max(5, 50 * recorded)
    print(f"time to first token, client - recorded: {sorted(differences)} ms")
    assert statistics.median(map(abs, differences)) < median_ms
    assert off <= len(requests) // 10


def assert_whole(roots: list[Span], answers: list[Answer], traces: dict[str, list[Span]]) -> None:
    """Check the requests of a front end that is not Python against what their clients got."""
    assert len(roots) == len(answers)
    usages = [[answer.usage[f"{name}_tokens"] for name in ("prompt", "completion")] for answer in answers]
    recorded = [
        [root.attributes[f"gen_ai.usage.{name}_tokens"] for name in ("input", "output")] for root in roots
    ]
    assert sorted(recorded) == sorted(usages)
    for root in roots:
        assert {"queue", "prefill", "decode"} <= {span.name for span in traces[root.trace_id]}
        assert root.attributes["gen_ai.latency.time_to_first_token"] > 0
        assert not root.is_error
