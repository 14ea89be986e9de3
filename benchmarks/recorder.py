"""What tracing costs: a span in the traced thread, an engine's steps at each level, a flood of spans.

python -m benchmarks.recorder [spans] [steps] [flood] [engine]
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from sgl_aspects.tracing import ring_format
from sgl_aspects.tracing.records import SpanEnd, SpanType
from sgl_aspects.tracing.ring import RingRecorder
from sgl_aspects.tracing.run_reader import RunReader

ROUNDS = 15
BATCH = 2000
FORWARD = SpanType("forward", {"mode": str, "size": int, "tokens": int, "share": float})
ATTRIBUTES: dict[str, Any] = {"mode": "decode", "size": 12, "tokens": 12, "share": 0.25}


class _Nowhere(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing to end."""


@contextmanager
def _folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="sgl-aspects-bench-", dir="/dev/shm") as folder:
        yield folder


def _with_tracer(tracer: trace.Tracer) -> Callable[[], None]:
    def span() -> None:
        with tracer.start_as_current_span("forward") as current:
            current.set_attributes(ATTRIBUTES)

    return span


def spans() -> None:
    """Nanoseconds of the traced thread for one span with four attributes; medians of interleaved rounds."""
    with _folder() as folder:
        recorder = RingRecorder(folder)
        new_id, clock, write = recorder.new_id, time.time_ns, recorder.spans(FORWARD)

        def ours() -> None:
            start = clock()
            write(new_id(), 1, 1, start, clock(), ("decode", 12, 12, 0.25))

        def record_only() -> None:
            write(5, 1, 1, 1, 2, ("decode", 12, 12, 0.25))

        sdk = TracerProvider()
        sdk.add_span_processor(BatchSpanProcessor(_Nowhere(), max_queue_size=1 << 20))
        subjects: dict[str, Callable[[], None]] = {
            "ours: record alone": record_only,
            "ours: with its two clock readings and its id": ours,
            "OTel API, no SDK": _with_tracer(trace.NoOpTracerProvider().get_tracer("bench")),
            "OTel SDK, batch processor, exporter that drops": _with_tracer(sdk.get_tracer("bench")),
        }
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ModuleNotFoundError:
            print("OTLP exporter: not installed")
        else:
            otlp = TracerProvider()
            otlp.add_span_processor(
                BatchSpanProcessor(OTLPSpanExporter("http://127.0.0.1:9/v1/traces", timeout=1))
            )
            subjects["OTel SDK, batch processor, OTLP to nobody"] = _with_tracer(otlp.get_tracer("bench"))
        times: dict[str, list[float]] = {name: [] for name in subjects}
        recorder.open()
        for _ in range(ROUNDS):
            for name, subject in subjects.items():
                gc.collect()
                before = time.perf_counter_ns()
                for _ in range(BATCH):
                    subject()
                times[name].append((time.perf_counter_ns() - before) / BATCH)
                recorder._words[ring_format.WORD_TAKEN] = recorder._slots._limit  # an attentive collector
        base = statistics.median(times["ours: with its two clock readings and its id"])
        for name, found in times.items():
            median = statistics.median(found)
            print(f"{name:50} median {median:8.0f} ns  best {min(found):8.0f} ns  {median / base:6.2f} x")
        recorder.close()


class _Batch:
    def __init__(self, reqs: list[Any]) -> None:
        self.forward_mode = _Mode()
        self.reqs = reqs
        self.step_id = 1
        self.num_new_tokens = [1] * len(reqs)
        self.batch_size = self.num_tokens = len(reqs)


class _Mode:
    value = "decode"


class _Event:
    """What a platform gives: here, of a device that is always done."""

    def record(self) -> None:
        """Now."""

    def query(self) -> bool:
        return True

    def elapsed_ms(self, end: _Event) -> float:
        return 1.0


class _Platform:
    device_name = "cpu"

    def is_capturing(self) -> bool:
        return False

    def create_event(self) -> _Event:
        return _Event()


class _Cache:
    total_size = 1000

    def available_size(self) -> int:
        return 500


class _Runner:
    platform = _Platform()


class _Scheduler:
    def __init__(self) -> None:
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.kv_cache = _Cache()


def steps() -> None:
    """Microseconds of the aspects in one decode step of eight requests, without the weaving's calls."""
    from sgl_aspects.engines import EMBEDDED
    from sgl_aspects.tracing.aspects.forward import ForwardAspect
    from sgl_aspects.tracing.aspects.scheduled import (
        ScheduledRequest,
        ScheduledRequestAspect,
        SchedulerState,
    )
    from sgl_aspects.tracing.aspects.step import StepAspect

    with _folder() as folder:
        recorder = RingRecorder(folder)
        recorder.open()
        state = SchedulerState(recorder)
        observers: dict[str, list[Any]] = {}
        for aspect in (
            ScheduledRequestAspect(recorder, EMBEDDED, state),
            StepAspect(recorder, EMBEDDED, state),
            ForwardAspect(recorder, EMBEDDED, state),
        ):
            for observation in aspect.observations():
                observers.setdefault(observation.role, []).append((observation.enter, observation.exit))
        reqs = [type("Req", (), {"rid": f"r{n}", "output_ids": []})() for n in range(8)]
        for number, req in enumerate(reqs):
            state.requests[req.rid] = ScheduledRequest(100 + number, 200 + number, 1)
        scheduler, batch, runner = _Scheduler(), _Batch(reqs), _Runner()

        def call(role: str, args: tuple[Any, ...], result: Any, inside: tuple[Any, ...] = ()) -> None:
            tokens = [enter(args, {}) for enter, _ in observers[role]]
            for inner in inside:
                call(*inner)
            for (_, exit), token in zip(observers[role], tokens):
                exit(token, result, None)

        inner = (("forward", (runner, batch), None), ("sample", (runner, None, batch), None))
        children = (
            ("schedule", (scheduler,), batch),
            ("run_batch", (scheduler, batch), None, inner),
            ("process_batch_result", (scheduler, batch, None), None),
        )
        for level in (0, 1, 2, 3):
            recorder._words[ring_format.WORD_LEVEL] = level
            found = []
            for _ in range(ROUNDS):
                before = time.perf_counter_ns()
                for _ in range(500):
                    call("step", (scheduler,), None, children)
                found.append((time.perf_counter_ns() - before) / 500 / 1000)
                recorder._words[ring_format.WORD_TAKEN] = recorder._slots._limit
            print(
                f"level {level}: median {statistics.median(found):6.2f} us a step, best {min(found):6.2f} us"
            )
        recorder.close()


def _write(recorder: RingRecorder, first: int, count: int) -> None:
    write = recorder.spans(FORWARD)
    for number in range(count):
        write(first + number + 1, 1, 1, 1, 2, ("decode", number, 12, 0.25))


def _write_in_process(folder: str, first: int, count: int) -> None:
    _write(RingRecorder(folder), first, count)


def flood(total: int = 1_000_000) -> None:
    """A million spans from four threads, and from four processes: exported + dropped = recorded."""
    each = total // 4
    for kind in ("threads", "processes"):
        with _folder() as folder:
            recorder = RingRecorder(folder)
            workers: list[Any] = []
            for number in range(4):
                if kind == "threads":
                    workers.append(threading.Thread(target=_write, args=(recorder, number * each, each)))
                else:
                    context = multiprocessing.get_context("spawn")
                    workers.append(
                        context.Process(target=_write_in_process, args=(folder, number * each, each))
                    )
            before = time.perf_counter()
            for worker in workers:
                worker.start()
            reader, seen = RunReader(folder), set()
            read = 0
            while any(worker.is_alive() for worker in workers) or reader.has_more:
                for _, record in reader.poll():
                    if isinstance(record, SpanEnd):
                        read += 1
                        seen.add(record.span_id)
            for _ in range(2):
                for _, record in reader.poll():
                    read += 1
                    seen.add(record.span_id)  # type: ignore[union-attr]
            seconds = time.perf_counter() - before
            state = "all accounted for" if read == len(seen) and read + reader.dropped == total else "WRONG"
            print(f"{total} spans from 4 {kind} in {seconds:.1f} s: {state}")
            print(f"  {read} read, {reader.dropped} dropped")
            reader.close()
            recorder.close()


def engine(pairs: int = 12) -> None:
    """Output tokens a second of the embedded engine with a tiny model: each level against off, in turns.

    One engine, whose level is changed live, so that nothing else differs. A tiny model is the worst case: a
    step of a real one takes ten to a hundred times as long.
    """
    from pathlib import Path

    from sgl_aspects.runtime.engine import Engine
    from sgl_aspects.runtime.sampling_params import SamplingParams
    from sgl_aspects.tracing import attach
    from sgl_aspects.tracing.control import Control, write_control
    from tests.tiny_models import make_llama

    sampling = SamplingParams(max_new_tokens=200, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        make_llama(Path(folder, "tiny"), max_position_embeddings=1024)
        file = str(Path(folder, "traces.jsonl"))
        with (
            attach(level=3, file=file) as session,
            Engine(model_path=Path(folder, "tiny"), max_total_tokens=4096) as running,
        ):
            running.generate("warm", sampling)
            (ring,) = Path(session.run_folder).glob(f"{running.scheduler_pid}-*.ring")

            def rate(level: int) -> float:
                write_control(ring, Control(level, 3))
                before = time.perf_counter()
                running.generate(["hello"] * 4, sampling)
                return 800 / (time.perf_counter() - before)

            for level in (0, 1, 2, 3):
                ratios = []
                for _ in range(pairs):
                    off = rate(0)
                    ratios.append(rate(level) / off)
                print(
                    f"level {level} in the scheduler: {statistics.median(ratios):.3f} x off's throughput "
                    f"({min(ratios):.3f} to {max(ratios):.3f}, {off:.0f} tokens/s off)"
                )
        print(session.summary)


def main() -> None:
    measures = {"spans": spans, "steps": steps, "flood": flood, "engine": engine}
    chosen = sys.argv[1:] or measures
    for name, measure in measures.items():
        if name in chosen:
            measure()


if __name__ == "__main__":
    main()
