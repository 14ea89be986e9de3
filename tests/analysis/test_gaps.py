"""The time between two tokens: as a client sees it, as a metric, and where it was long."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource

from sgl_aspects.analysis.causes import Cause, Causes, Gap
from sgl_aspects.analysis.spans import read_spans
from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.tracing import attach
from sgl_aspects.tracing.collect.join import Joiner
from sgl_aspects.tracing.collect.token_gaps import TokenGaps
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.records import RequestBegin, RequestSeen, RequestSent, SpanBegin, SpanEnd, SpanType
from sgl_aspects.tracing.schema import DECODE, STEP
from tests.support.otlp_receiver import http_receiver
from tests.support.tiny_models import llama_fixture

pytestmark = pytest.mark.usefixtures("forked_collectors", "forked_schedulers")

STALL = 1.0
SEEN = 10


model = llama_fixture()


def answer(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, ignore_eos=True)


def test_each_gap_is_one_that_a_client_sees(model: Path, tmp_path: Path) -> None:
    """Also over a stall, whose cause is named, and for requests that come and go meanwhile.

    No time is compared with another one of this process, which may get no processor for as long as a step.
    """
    file = tmp_path / "spans.jsonl"
    tokens = {"a": 60, "b": 20, "c": 40}
    with (
        attach(level=3, exporters=["otlp-json-file"], file=str(file)),
        Engine(model_path=model) as engine,
    ):
        engine.generate([5] * 8, answer(4))
        begun = time.time_ns()
        first = engine.submit([7] * 8, answer(tokens["a"]), rid="a")
        others = [engine.submit([9] * 40, answer(tokens[rid]), rid=rid) for rid in ("b", "c")]
        seen = 0  # of its tokens, before the stall
        chunks = iter(first)
        for chunk in chunks:
            seen += len(chunk.token_ids)
            if seen > SEEN:
                break
        (scheduler,) = multiprocessing.active_children()
        os.kill(scheduler.pid or 0, signal.SIGSTOP)
        stopped = time.time_ns()
        time.sleep(STALL)
        continued = time.time_ns()
        os.kill(scheduler.pid or 0, signal.SIGCONT)
        assert seen + sum(len(chunk.token_ids) for chunk in chunks) == tokens["a"]
        for handle in others:
            handle.result()
        ended = time.time_ns()
    causes = Causes(read_spans(file))
    for rid, count in tokens.items():
        (request,) = causes.find(rid)
        assert len(causes.gaps(request)) == count - 1
    (request,) = causes.find("a")
    gaps = causes.gaps(request)
    assert all(after.start_ns == before.step.end_ns for before, after in itertools.pairwise(gaps))
    assert begun < gaps[0].start_ns < gaps[-1].step.end_ns < ended
    before = [gap for gap in gaps if gap.step.end_ns <= stopped]
    assert len(before) >= seen - 2  # of the last token that was seen the step may not have ended

    def stall_in(gap: Gap) -> int:
        return min(gap.step.end_ns, continued) - max(gap.start_ns, stopped)

    longest = max(gaps, key=stall_in)
    assert stall_in(longest) > 0.9 * (continued - stopped)
    found = causes.explain_gap(request, longest)
    assert found.ranked()[0][0] is Cause.HOST
    assert sum(found.seconds.values()) == pytest.approx(longest.seconds)


def test_a_histogram_has_a_sample_for_each_gap_and_opens_the_trace(model: Path) -> None:
    tokens = [30, 12, 25]
    with http_receiver() as receiver:
        with attach(level=2, endpoint=receiver.endpoint), Engine(model_path=model) as engine:
            handles = [engine.submit([7 + n] * 30, answer(count)) for n, count in enumerate(tokens)]
            for handle in handles:
                handle.result()
        (point,) = receiver.points("sgl_aspects.inter_token_latency")
        assert point.count == sum(tokens) - len(tokens)
        traces = {span.trace_id for span in receiver.spans if span.name.startswith("text_completion")}
        assert len(traces) == len(tokens)
        for name in ("sgl_aspects.inter_token_latency", "gen_ai.server.request.duration"):
            opened = {exemplar.trace_id.hex() for exemplar in receiver.exemplars(name)}
            assert opened
            assert opened <= traces, name


def test_a_preempted_request_has_one_gap_until_its_next_token() -> None:
    """Its prompt is computed again in parts. Right after its first token, as between any two."""
    gaps = TokenGaps()
    found = []
    passes: list[list[SpanBegin | SpanEnd]] = [
        [SpanBegin(DECODE, 1, 8, 8, 95), SpanEnd(STEP, 10, 10, 0, 50, 100, links=[8])],
        [SpanEnd(DECODE, 1, 8, 8, 95, 101, [1, None]), SpanEnd(STEP, 11, 11, 0, 110, 200, links=[8])],
        [SpanEnd(STEP, 12, 12, 0, 200, 300, links=[8]), SpanBegin(DECODE, 2, 8, 8, 390)],
        [SpanEnd(STEP, 13, 13, 0, 300, 400, links=[8]), SpanEnd(DECODE, 2, 8, 8, 390, 490, [3, "stop"])],
        [SpanEnd(STEP, 14, 14, 0, 400, 500, links=[8])],
    ]
    for record in itertools.chain(*passes):
        found += [gap for _, gap in gaps.take(record)]
    assert found == [295, 110]
    assert not len(gaps)


@pytest.mark.parametrize("ends", ["before it decodes", "while it decodes"])
def test_a_request_that_ends_in_no_step_is_not_followed_for_ever(ends: str) -> None:
    """Its caller went away: the scheduler writes its next token's step without it."""
    gaps = TokenGaps()
    joiner: Any = Joiner(Resource({}), lambda span: None, on_forgotten=gaps.forget)
    of_none = {"process_id": 1, "was_detached": False, "is_counted": False}
    caller, scheduler = (SimpleNamespace(name=name, **of_none) for name in "ab")
    joiner.add(
        caller,
        RequestBegin(7, "r", 5, *TraceContext(0xABC), "chat m", {}),
        RequestSent(7),
        SpanEnd(SpanType("request"), 7, 7, 0, 5, 20 if ends == "before it decodes" else 40, error="abort"),
    )
    decodes = SpanBegin(DECODE, 9, 8, 8, 30), SpanEnd(DECODE, 9, 8, 8, 30, 50, [3, "abort"])
    joiner.add(scheduler, RequestSeen(8, "r", 6), *decodes)
    for record in decodes:
        assert not list(gaps.take(record))
    assert len(gaps) == 1  # until the last step that may tell of it is read
    for number in range(100, 6000):
        step = SpanEnd(STEP, number, number, 0, 50 + number, 51 + number)
        joiner.add(scheduler, step)
        assert not list(gaps.take(step))
        joiner.match_waiting()
    assert len(gaps) == 0
