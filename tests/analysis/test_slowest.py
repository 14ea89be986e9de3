"""Causes on the spans of slow requests, as the collector exports them."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource

from sgl_aspects.analysis.causes import Cause, Causes
from sgl_aspects.analysis.slowest import SlowRequests
from sgl_aspects.analysis.spans import Span, read_spans, span_of
from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.tracing import attach, schema
from sgl_aspects.tracing.collect.join import Joiner
from sgl_aspects.tracing.collect.process import Collector
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.export.span import CollectedSpan
from sgl_aspects.tracing.records import RequestBegin, RequestSeen, RequestSent, SpanEnd, SpanType
from sgl_aspects.tracing.settings import TraceSettings
from tests.support import workers
from tests.support.joined import Writer
from tests.support.tiny_models import llama_fixture

pytestmark = pytest.mark.usefixtures("forked_collectors", "forked_schedulers")

SLOW = 0.02
MS = 1_000_000
spawn = multiprocessing.get_context("spawn")


model = llama_fixture(max_position_embeddings=8192)


def exported(model: Path, file: Path) -> list[Span]:
    """The spans of a run in which a request with a long prompt delays one that decodes."""
    with (
        attach(level=3, exporters=["otlp-json-file"], file=str(file)),
        Engine(
            model_path=model,
            max_total_tokens=16384,
            prefix_cache=False,
            chunked_prefill_size=4096,
            max_running_requests=8,
        ) as engine,
    ):
        engine.generate([5] * 8, SamplingParams(max_new_tokens=4))  # first calls are slow
        # It still decodes when the other one comes, and ends first.
        some = SamplingParams(max_new_tokens=600, ignore_eos=True)
        chunks = iter(engine.submit([7] * 8, some, rid="decoding"))
        next(chunks)
        long = engine.submit([9] * 3000, SamplingParams(max_new_tokens=900, ignore_eos=True), rid="long")
        list(chunks)
        long.result()
        engine.generate([5] * 8, SamplingParams(max_new_tokens=1), rid="short")
    return read_spans(file)


def causes_on(span: Span) -> dict[str, Any]:
    prefix = schema.CAUSE_PREFIX
    found = span.attributes.items()
    return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}


def test_a_slow_request_says_why_and_who_delayed_it(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``sgl-aspects why`` says afterwards, from all spans. A quick request has no causes."""
    monkeypatch.setenv("SGL_ASPECTS_TRACE_CAUSES", str(SLOW))
    spans = exported(model, tmp_path / "spans.jsonl")
    causes = Causes(spans)
    (slow,) = causes.find("decoding")
    found = causes_on(slow)
    assert found.pop("culprits") == ["long"]
    assert sum(found.values()) == pytest.approx(slow.seconds)
    later = causes.explain(slow).seconds
    assert found["others_prefill"] == pytest.approx(later[Cause.OTHERS_PREFILL], rel=0.1)
    assert not any(causes_on(request) for request in causes.requests if request.seconds < SLOW)


def test_steps_before_a_slow_request_tell_how_long_its_own_part_of_mixed_ones_takes() -> None:
    """Its steps have all of others' prompts in them, from 120 to 150 and to 180 ms."""
    found: list[CollectedSpan] = []
    joiner, caller, scheduler = Joiner(Resource({}), found.append), Writer("1"), Writer("2")

    def add(writer: Any, *records: Any) -> None:
        joiner.add(writer, *records)
        for _ in range(3):
            joiner.match_waiting()

    def span(type: SpanType, root: int, start: int, end: int, links: Sequence[int] = (), **known: Any) -> Any:
        span_id = next(ids)
        values = [known.get(name.rpartition(".")[2]) for name in type.attributes]
        is_step = type is schema.STEP
        roots = (span_id, 0) if is_step else (root, root)
        return SpanEnd(type, span_id, *roots, start * MS, end * MS, values, "", links)

    ids = itertools.count(100)
    for number, start in ((1, 0), (2, 100), (3, 120)):
        origin = TraceContext(number, 0, True, "", False)
        add(
            caller, RequestBegin(number, f"r{number}", start * MS, *origin, "chat m", {}), RequestSent(number)
        )
        add(scheduler, RequestSeen(number + 10, f"r{number}", start * MS))
    add(scheduler, *(span(schema.STEP, 0, at, at + 10, [11], mode="decode") for at in range(0, 90, 10)))
    add(
        scheduler,
        span(schema.PREFILL, 12, 100, 120, tokens=8),
        span(schema.STEP, 0, 100, 120, [12], mode="extend"),
    )
    for at in (120, 150):
        add(scheduler, span(schema.PREFILL, 13, at, at + 30, tokens=8))
        add(scheduler, span(schema.STEP, 0, at, at + 30, [12, 13], mode="mixed"))
    add(scheduler, span(schema.DECODE, 12, 120, 180))
    explain = SlowRequests(SLOW).explain
    explain(found)
    found.clear()
    add(caller, SpanEnd(schema.REQUEST, 2, 2, 0, 100 * MS, 180 * MS))
    explain(found)
    (slow,) = found
    causes = causes_on(span_of(slow.readable()))
    assert causes["decode"] == pytest.approx(0.02)
    assert causes["others_prefill"] == pytest.approx(0.04)


def test_no_request_says_why_unless_it_is_asked_for(model: Path, tmp_path: Path) -> None:
    assert not any(causes_on(span) for span in exported(model, tmp_path / "spans.jsonl"))


def test_a_fault_in_explaining_loses_no_spans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(spans: Sequence[Any]) -> None:
        raise ValueError("odd")

    run, file = tmp_path / "run", tmp_path / "spans.jsonl"
    run.mkdir()
    owner = spawn.Process(
        target=workers.record_like_a_scheduler, args=(str(run), [f"r{number}" for number in range(3)], "exit")
    )
    owner.start()
    owner.join()
    settings = TraceSettings(exporters=("otlp-json-file",), file=str(file))
    Collector(str(run), settings, explainer=lambda settings: fail).finish()
    assert len(read_spans(file)) > 0
    assert capsys.readouterr().err.count("no causes on slow requests from here on: ValueError: odd") == 1
