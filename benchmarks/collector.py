"""The collector's cost of a span, stage by stage, and the request rate that it sustains.

    python -m benchmarks.collector [--level 1] [--rate 10000 --seconds 60 --writers 8]

Writers record requests as an engine's processes do, one in two the process that receives requests, the other
its scheduler. Without ``--rate`` they fill rings, and each stage takes the output of the one before it; with
it they record at that rate while a collector exports to a backend on loopback. Shown are the collector's
processor time, and the spans delivered and dropped. The last rows are a collector's whole process over full
rings, which sends to that backend, without its start: the difference between few and many requests.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import NamedTuple

from benchmarks.receiver import counted, receiver
from benchmarks.spans import processor_seconds
from sgl_aspects.tracing import attach, context
from sgl_aspects.tracing.collect.join import Joiner
from sgl_aspects.tracing.collect.process import _collect_garbage_seldom
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.collect.span_builder import engine_resource
from sgl_aspects.tracing.collect.summary import TraceSummary
from sgl_aspects.tracing.export.otlp_encoder import SpanEncoder
from sgl_aspects.tracing.export.span import CollectedSpan
from sgl_aspects.tracing.lifecycle.requests import Chunk, RequestTracker
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import RequestBegin, RequestSent
from sgl_aspects.tracing.schema import DETOKENIZE, REQUEST, STEP, TOKENIZE

_BATCH = 512
#: Requests that are under way at once, and steps that each of them is part of.
_OPEN, _STEPS = 64, 8
_TICK_SECONDS = 0.005
spawn = multiprocessing.get_context("spawn")


class Shapes:
    """Requests and steps of one server, as SGLang's observers record them."""

    def __init__(self, folder: str, number: int, level: int) -> None:
        self.front, self.back = RingRecorder(folder), RingRecorder(folder)
        self._tracker = RequestTracker(self.back)
        self._open: list[tuple[str, int, int]] = []
        self._number, self._count, self._level = number, 0, level
        self._tokenize, self._detokenize, self._request, self._step = (
            *(self.front.spans(each) for each in (TOKENIZE, DETOKENIZE, REQUEST)),
            self.back.spans(STEP),
        )

    def request(self) -> None:
        """Begin a request, and end the oldest one."""
        recorder, now, rid = self.front, time.monotonic_ns(), f"{self._number}-{self._count:030x}"
        self._count += 1
        span_id = recorder.new_id()
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "sglang",
            "gen_ai.request.model": "meta-llama/Llama-3.1-8B-Instruct",
            "gen_ai.response.model": "meta-llama/Llama-3.1-8B-Instruct",
            "gen_ai.request.id": rid,
            "gen_ai.request.max_tokens": 256,
            "gen_ai.request.temperature": 0.7,
            "gen_ai.request.top_p": 0.95,
            "gen_ai.request.stream": True,
        }
        recorder.write(RequestBegin(span_id, rid, now, *context.new(), "chat model", attributes))
        self._tokenize(recorder.new_id(), span_id, span_id, now, time.monotonic_ns(), (412,))
        recorder.write(RequestSent(span_id))
        request = self._tracker.queued(rid)
        self._tracker.launched(request, time.monotonic_ns())
        self._tracker.prefilled([Chunk(SimpleNamespace(), request, 412, now, True)])
        self._open.append((rid, span_id, now))
        if self._level > 1 and self._count % (_OPEN // _STEPS) == 0:
            self._run_step()
        if len(self._open) > _OPEN:
            self._end(*self._open.pop(0))

    def _run_step(self) -> None:
        now, step_id = time.monotonic_ns(), self.back.new_id() | 1 << 63
        keys = [self._tracker.requests[rid].key for rid, *_ in self._open]
        values = (self._count, "decode", len(keys), len(keys), 0, len(keys), 0.5)
        self._step(step_id, step_id, 0, now, time.monotonic_ns(), values, "", keys)

    def _end(self, rid: str, span_id: int, start: int) -> None:
        self._tracker.finished(rid, 120, "stop")
        now = time.monotonic_ns()
        self._detokenize(self.front.new_id(), span_id, span_id, start, now, (120, 0.004))
        values = [f"chatcmpl-{rid}", ["stop"], 0.031, 412, 120, 256, 0.031, 1.5, None, None]
        self._request(span_id, span_id, 0, start, now, values)

    def close(self) -> None:
        while self._open:
            self._end(*self._open.pop(0))
        self.front.close()
        self.back.close()


class Stage(NamedTuple):
    """Microseconds of processor time a span."""

    name: str
    microseconds: float


def _fill(folder: str, number: int, level: int, requests: int) -> None:
    shapes = Shapes(folder, number, level)
    for _ in range(requests):
        shapes.request()
    shapes.close()


@contextmanager
def _full_rings(level: int, servers: int, requests: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="sgl-aspects-bench-", dir="/dev/shm") as folder:
        for number in range(servers):
            process = spawn.Process(target=_fill, args=(folder, number, level, requests))
            process.start()
            process.join()
        yield folder


def whole(level: int, metrics: str, servers: int = 4) -> Stage:
    """A collector's process over rings that are already written. ``metrics``: their exporter, or none."""
    spent, spans = [], []
    with receiver() as url:
        settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"{url}/whole", "OTEL_METRICS_EXPORTER": metrics}
        settings |= {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
        for requests in 300, 4300:
            with _full_rings(level, servers, requests) as folder:
                command = [sys.executable, "-m", "sgl_aspects.collector", folder]
                process = subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.PIPE)
                assert process.stdout is not None
                spans.append(TraceSummary.from_json(process.stdout.read().decode()).exported["otlp"])
                _, process.returncode, usage = os.wait4(process.pid, 0)
                spent.append(usage.ru_utime + usage.ru_stime)
    name = "whole, with metrics" if metrics == "otlp" else "whole"
    return Stage(name, (spent[1] - spent[0]) * 1e6 / (spans[1] - spans[0]))


def joined(folder: str, spent: list[float] | None = None) -> Iterator[CollectedSpan]:
    """Yield the spans of rings that are already written.

    :param spent: of this thread, the seconds of reading, and of joining and building, are added to.
    """
    reader, spans, clock, is_last = RunReader(folder), [], time.thread_time, False
    joiner = Joiner(engine_resource(folder), spans.append)
    spent = [0.0, 0.0] if spent is None else spent
    while not is_last:
        start = clock()
        records = list(reader.poll_rings())
        is_last = not any(read for _, read in records) and not reader.has_more
        read = clock()
        for writer, found in records:
            joiner.add(writer, *found)
        if is_last:
            joiner.finish()
        joiner.match_waiting(is_behind=reader.has_more)
        spent[:] = spent[0] + read - start, spent[1] + clock() - read
        yield from spans
        spans.clear()
    if joiner.unjoined or reader.dropped:
        print(f"unjoined {joiner.unjoined}, dropped {reader.dropped}")
    reader.close()


def stages(level: int, servers: int = 4, requests: int = 1500) -> list[Stage]:
    """The stages of a collector that is far behind; spans are dropped when they are encoded, as it does."""
    _collect_garbage_seldom()
    spent, encoding, encoder, size, count = [0.0, 0.0], 0.0, SpanEncoder(), 0, 0
    with _full_rings(level, servers, requests) as folder:
        spans = joined(folder, spent)
        while batch := list(islice(spans, _BATCH)):
            start = time.thread_time()
            size += len(encoder.encode(batch))
            encoding += time.thread_time() - start
            count += len(batch)
    each = [seconds * 1e6 / count for seconds in (*spent, encoding)]
    print(f"level {level}: {count} spans, {size / count:.0f} bytes each as OTLP")
    return [*map(Stage, ("read", "join, build", "encode", "total"), (*each, sum(each)))]


def _load(folder: str, level: int, rate: float, seconds: float, number: int) -> tuple[int, float]:
    shapes, started = Shapes(folder, number, level), time.monotonic()
    done, spent = 0, time.process_time()
    while (now := time.monotonic() - started) < seconds:
        for _ in range(int(now * rate) - done):
            shapes.request()
            done += 1
        time.sleep(_TICK_SECONDS)
    spent = time.process_time() - spent
    shapes.close()
    return done, spent


def load(level: int, rate: float, seconds: float, writers: int) -> str:
    """A collector beside ``writers`` writers that begin ``rate`` requests a second between them."""
    servers = writers // 2
    with receiver() as url:
        os.environ.update(OTEL_METRICS_EXPORTER="otlp", SGL_ASPECTS_TRACE_FLUSH_SECONDS="60")
        session = attach(level=1, endpoint=f"{url}/load")
        record = partial(_load, session.run_folder, level, rate / servers, seconds)
        try:
            with ProcessPoolExecutor(servers, mp_context=spawn) as pool:
                results = list(pool.map(record, range(servers)))
            collector, began = session.collector_process_id, time.monotonic()
            spent = processor_seconds(collector)
            while processor_seconds(collector) - spent > 0.05 or time.monotonic() - began < 6:
                spent = processor_seconds(collector)
                time.sleep(1)
        finally:
            session.close(90)
        summary, delivered = session.summary, counted(url).get("load", 0)
    done = sum(count for count, _ in results)
    return (
        f"level {level}: {done / seconds:,.0f} requests/s (target {rate:,.0f}), {writers} writers; "
        f"spans delivered {delivered:,} = {delivered / done:.2f} a request, "
        f"records dropped {summary.dropped:,}, unjoined {summary.unjoined:,}, "
        f"collector {spent * 1e6 / delivered:.1f} µs a span ({spent / seconds:.2f} processors), "
        f"writers {sum(each for _, each in results) * 1e6 / done:.0f} µs a request"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collector", description=__doc__)
    parser.add_argument("--level", type=int, default=1)
    parser.add_argument("--rate", type=float, default=0, help="requests a second, of all writers")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--writers", type=int, default=8)
    given = parser.parse_args()
    if given.rate:
        print(load(given.level, given.rate, given.seconds, given.writers))
    else:
        for stage in [*stages(given.level), *(whole(given.level, each) for each in ("none", "otlp"))]:
            print(f"    {stage.name:<20}{stage.microseconds:6.2f} µs a span")


if __name__ == "__main__":
    main()
