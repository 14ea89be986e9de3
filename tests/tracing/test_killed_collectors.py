"""Spans that a killed collector had read and not delivered: the next one delivers them, with the same ids."""

from __future__ import annotations

import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.tracing import attach
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.record import format as ring_format
from sgl_aspects.tracing.record.recorder import Recorder
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import ProcessDescribed, SpanEnd
from sgl_aspects.tracing.schema import DISAGGREGATION_MODE, FOLLOWER, RANK, STEP
from tests.support.collectors import has_delivered, kill_collector
from tests.support.otlp_receiver import http_receiver, points_of
from tests.support.processes import wait_until
from tests.support.sessions import REQUEST, begin, read_file, run_scheduler


def test_what_a_killed_collector_held_is_delivered_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    has_begun, opened = threading.Event(), threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        has_begun.set()
        if opened.wait(60):
            handler.send_response(200)
            handler.end_headers()

    with http_receiver(answer) as slow:
        session = attach(endpoint=slow.endpoint)
        for number in range(20):
            end = begin(session, f"r{number}")
            run_scheduler(session, [f"r{number}"]) if number < 2 else None
            end()
        assert has_begun.wait(60)
        kill_collector(session)
        opened.set()
        begin(session, "after")()
        summary = session.close()
    assert (summary.problem, summary.restarted, summary.dropped, summary.unjoined) == ("", True, 0, 0)
    received = slow.spans
    by_id = {span.span_id: span for span in received}
    found = sorted(str(span.attributes["gen_ai.request.id"]) for span in by_id.values() if span.kind == 2)
    assert found == sorted([*(f"r{number}" for number in range(20)), "after"])
    # A copy differs in nothing: a backend keeps one of the two.
    assert [span for span in received if by_id[span.span_id] != span] == []
    steps = [span for span in by_id.values() if span.name == "scheduler.step"]
    traces = {span.trace_id for span in by_id.values() if span.kind == 2}
    assert [link[0] in traces for step in steps for link in step.links] == [True, True]


def test_a_backend_that_hangs_takes_half_of_the_ring_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was released before it was delivered counts as lost where the collector is killed."""
    monkeypatch.setattr(ring_format, "SLOTS", 256)
    recorder = RingRecorder(str(tmp_path))
    reader = RunReader(str(tmp_path))
    write, taken = recorder.spans(REQUEST), 0
    for _ in range(5):
        for number in range(100):
            write(recorder.new_id(), 1, 1, 1, 2, [number])
        for writer, records in reader.poll_rings():
            taken += sum(isinstance(record, SpanEnd) for record in records)
            writer.commit(50)  # delivered, of all that were read
    reader.close()
    (path,) = tmp_path.glob("*.ring")
    next_reader = RingReader(path)
    assert next_reader.taken == taken - 128
    assert next_reader.lost == taken - 128 - 50
    next_reader.close()
    recorder.close()


def test_a_line_that_a_killed_collector_began_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    file = tmp_path / "traces.jsonl"
    session = attach(file=str(file))
    begin(session, "before")()
    collector = session.collector_process_id
    assert collector is not None
    wait_until(file.exists)
    os.kill(collector, signal.SIGSTOP)
    with file.open("a") as torn:
        torn.write('{"resourceSpans":[{"resou')
    kill_collector(session)
    begin(session, "after")()
    assert session.close().problem == ""
    spans = {span.span_id: span for span in read_file(file)}
    assert sorted(str(span.attributes["gen_ai.request.id"]) for span in spans.values()) == ["after", "before"]


def test_the_next_collector_knows_processes_whose_description_was_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two ranks that run the same batches one follows: its steps remain uncounted."""
    monkeypatch.setattr(ring_format, "SLOTS", 256)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    with http_receiver() as backend:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", backend.endpoint)
        session = attach(endpoint=backend.endpoint)
        follower = RingRecorder(session.run_folder)
        ranks: list[tuple[Recorder, Any]] = [(session.recorder, {RANK: "tp0"})]
        ranks += [(follower, {RANK: "tp1", FOLLOWER: True, DISAGGREGATION_MODE: "decode"})]

        def steps(count: int) -> None:
            for number in range(count):
                for recorder, _ in ranks:
                    step, now = recorder.new_id(), time.monotonic_ns()
                    recorder.spans(STEP)(step, step, 0, now, now + 1, [number, "decode", 1, 1, 0, 1, 0.5])

        for recorder, described in ranks:
            recorder.write(ProcessDescribed(described))
        for _ in range(4):
            steps(100)
            wait_until(lambda: has_delivered(session))
        wait_until(lambda: [point.count for point in backend.points("sgl_aspects.step.duration")] == [400])
        kill_collector(session)
        steps(10)
        wait_until(lambda: len(backend.named("scheduler.step")) == 820)
        follower.close()
        session.close()
    spans = backend.named("scheduler.step")
    assert {span.attributes.get(RANK) for span in spans[-20:]} == {"tp0", "tp1"}
    assert {span.resource.get(DISAGGREGATION_MODE) for span in spans[-20:]} == {"decode"}
    assert [point.count for point in backend.points("sgl_aspects.step.duration")] == [10]


@pytest.mark.parametrize(("metrics_ms", "spans_ms"), [(100, 3_600_000), (3_600_000, 100)])
def test_metrics_count_once_what_a_killed_collector_had_read(
    monkeypatch: pytest.MonkeyPatch, metrics_ms: int, spans_ms: int
) -> None:
    """It is killed when the metrics are exported and no span is, and when only the spans are."""
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", str(metrics_ms))
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", str(spans_ms))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "delta")
    with http_receiver() as backend:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", backend.endpoint)
        session = attach(endpoint=backend.endpoint)

        def counted() -> tuple[int, ...]:
            messages = list(backend.metric_requests)
            names = ("gen_ai.server.request.duration", "sgl_aspects.step.duration")
            return tuple(
                sum(point.count for each in messages for point in points_of(each, name)) for name in names
            )

        def serve(count: int) -> None:
            for number in range(count):
                begin(session, f"r{number}")()
                step, now = session.recorder.new_id(), time.monotonic_ns()
                session.recorder.spans(STEP)(step, step, 0, now, now + 1, [number, "decode", 1, 1, 0, 1, 0.5])

        serve(20)
        wait_until(lambda: counted() == (20, 20) if metrics_ms == 100 else has_delivered(session))
        kill_collector(session)
        serve(5)
        session.close()
    assert counted() == (25, 25)
    assert len({span.span_id for span in backend.spans}) == 50
