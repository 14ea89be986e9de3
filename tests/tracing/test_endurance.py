"""Tests that take minutes: two hundred kills, a million spans, failing backends, killed collectors."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import psutil
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from sgl_aspects.tracing import TraceSession, attach
from sgl_aspects.tracing.record import format as ring_format
from sgl_aspects.tracing.records import SpanType
from tests.support import workers
from tests.support.collectors import kill_collector_for_good, started_again
from tests.support.otlp_receiver import backend, spans_of
from tests.support.processes import wait_until
from tests.support.rings import written_until_killed
from tests.support.sessions import read_file, spawn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_ASPECTS_TRACE_FLUSH_SECONDS", "120")


def exported(file: Path) -> Iterator[Any]:
    """Every span of an OTLP-JSON file."""
    for message in read_file(file):
        yield from spans_of(message)


def test_two_hundred_kills_lose_and_repeat_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the collector to the exporter: every finished span once, the open one marked, none torn."""
    monkeypatch.setattr(ring_format, "SLOTS", 1 << 13)
    chance = random.Random(time.time_ns())
    file, finished = tmp_path / "traces.jsonl", []
    with attach(file=str(file)) as session:
        for number in range(200):
            seconds = chance.random() * 0.004
            finished.append(written_until_killed(session.run_folder, seconds, roots=number + 1))
    ended: dict[int, list[int]] = {}
    unfinished: Counter[int] = Counter()
    for span in exported(file):
        writer, number = divmod(int(span.span_id, 16), workers.SPANS_OF_ONE)
        if span.is_error:
            assert span.attributes == {"error.type": "unfinished", "sgl_aspects.unfinished": True}
            unfinished[writer] += 1
            continue
        ended.setdefault(writer, []).append(number)
        expected = {"number": number, "half": number / 2, "mode": "decode", "list": [number]}
        assert span.attributes == {key: expected[key] for key in span.attributes}
        assert len(span.attributes) == (3 if number % 3 else 4)
        assert span.end == span.start + number
    for writer, at_least in enumerate(finished, 1):
        numbers = sorted(ended.get(writer, []))
        assert numbers == list(range(1, len(numbers) + 1)), writer
        assert len(numbers) >= at_least
        assert unfinished[writer] <= 1
    summary = session.summary
    assert summary is not None
    assert (summary.dropped, summary.damaged, summary.unjoined) == (0, 0, 0)
    assert summary.unfinished == sum(unfinished.values()) > 0
    assert summary.exported["otlp-json-file"] == sum(map(len, ended.values())) + summary.unfinished


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_million_spans_are_accounted_for(tmp_path: Path, kind: str) -> None:
    """Far faster than any backend takes them: exported + dropped = recorded, and none twice."""
    total, each = 1_000_000, 250_000
    file = tmp_path / "traces.jsonl"
    with attach(file=str(file)) as session:
        if kind == "threads":
            write = session.recorder.spans(SpanType("plain", {"number": int}))

            def record(first: int) -> None:
                for number in range(first + 1, first + each + 1):
                    write(number, number, 0, 1, 2, [number])

            hands: list[Any] = [threading.Thread(target=record, args=(n * each,)) for n in range(4)]
        else:
            arguments = [(session.run_folder, n * each, each, True) for n in range(4)]
            hands = [spawn.Process(target=workers.record_spans, args=each_) for each_ in arguments]
        for hand in hands:
            hand.start()
        for hand in hands:
            hand.join()
    ids = Counter(span.span_id for span in exported(file))
    summary = session.summary
    assert summary is not None
    assert max(ids.values()) == 1
    assert len(ids) == summary.exported["otlp-json-file"] > 32_000
    assert len(ids) + summary.dropped == total
    assert (summary.damaged, summary.unjoined, summary.not_delivered) == (0, 0, {"otlp-json-file": 0})


class Backend:
    """An OTLP/HTTP backend with moods: ok, slow (two seconds a request), refusing (503), or down."""

    def __init__(self) -> None:
        self.mood, self.spans, self._server = "ok", Counter[str](), contextlib.ExitStack()
        self.endpoint = self._server.enter_context(backend(self._answer))

    def _answer(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if self.mood == "slow":
            time.sleep(2)
        if self.mood != "refusing":
            self.spans.update(span.span_id for span in spans_of(ExportTraceServiceRequest.FromString(body)))
        handler.send_response(503 if self.mood == "refusing" else 200)
        handler.end_headers()

    def be(self, mood: str) -> None:
        if mood == "down":
            self.close()
        elif self.mood == "down":
            port = int(self.endpoint.rpartition(":")[2])
            self._server.enter_context(backend(self._answer, port))
        self.mood = mood

    def close(self) -> None:
        self._server.close()


def test_a_backend_that_fails_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector's memory stays bounded, what is lost is counted, and afterwards all is as before."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    monkeypatch.setenv("SGL_ASPECTS_TRACE_FLUSH_SECONDS", "20")
    moody = Backend()
    recorded, longest = 0, {}
    with attach(endpoint=moody.endpoint) as session:
        write = session.recorder.spans(SpanType("plain", {"number": int, "text": str}))
        collector = psutil.Process(session.collector_process_id)
        memory = []
        for mood in ("ok", "slow", "refusing", "down", "ok"):
            moody.be(mood)
            seen = len(moody.spans)
            times = []
            for _ in range(60):
                start = time.thread_time_ns()
                for _ in range(100):
                    recorded += 1
                    write(recorded, recorded, 0, 1, 2, [recorded, "x" * 100])
                times.append(time.thread_time_ns() - start)
                time.sleep(0.05)
            memory.append(collector.memory_info().rss >> 20)
            longest[mood] = sorted(times)[len(times) // 2]
            if mood == "ok":
                wait_until(lambda seen=seen: len(moody.spans) > seen + 500, 60)  # type: ignore[misc]
    summary = session.summary
    assert summary is not None
    assert max(moody.spans.values()) <= 2  # a request that was answered too late is sent again
    # Of what a slow backend took, some was given up here before its answer came.
    delivered, missed = summary.exported["otlp"], summary.not_delivered["otlp"]
    assert delivered <= len(moody.spans)
    assert summary.spans_recorded == delivered + missed
    assert delivered + missed + summary.dropped == recorded
    assert missed > 1000
    assert delivered > 4000
    assert memory[-1] < memory[0] + 150
    # In the traced thread nothing is different: no call waits for another process.
    assert max(longest.values()) < 20 * min(longest.values())
    moody.close()


def test_collectors_that_are_killed_again_and_again(tmp_path: Path) -> None:
    """No span is lost; those that are sent again have the same ids."""
    file = tmp_path / "traces.jsonl"
    session = attach(file=str(file))
    stop = threading.Event()
    recorded = 0

    def record() -> None:
        nonlocal recorded
        write = session.recorder.spans(SpanType("plain", {"number": int}))
        while not stop.is_set():
            for _ in range(20):
                recorded += 1
                write(recorded, recorded, 0, 1, 2, [recorded])
            time.sleep(0.01)

    writer = threading.Thread(target=record, daemon=True)
    writer.start()
    kill_collector_for_good(session)
    for _ in range(4):
        with start_collector(session) as again:
            seen = size_of(file)
            try:
                wait_until(lambda seen=seen: size_of(file) > seen)  # type: ignore[misc]
            finally:
                again.kill()
    with started_again(session, OTEL_BSP_SCHEDULE_DELAY="200") as summary:
        time.sleep(0.5)
        stop.set()
        writer.join()
    session.close()
    ids = {span.span_id for span in exported(file)}
    assert (len(ids), summary["dropped"], summary["damaged"]) == (recorded, 0, 0)


def size_of(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def start_collector(session: TraceSession) -> subprocess.Popen[bytes]:
    environment = session.settings.collector_environment()
    environment["OTEL_BSP_SCHEDULE_DELAY"] = "200"
    command = [sys.executable, "-m", "sgl_aspects.collector", session.run_folder]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
