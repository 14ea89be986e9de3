"""A wall clock that is corrected while requests are served changes no duration and tears no trace apart."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.otlp_receiver import Receiver
from tests.support.processes import output_of, python
from tests.support.tiny_models import llama_fixture
from tests.support.wall_clock import WallClock, wall_clock

YEAR, HOUR = 365 * 86400, 3600
ROOT = Path(__file__).resolve().parents[2]

# The application's providers are set in both processes of the engine: each of them reports for itself.
PROGRAM = """
import multiprocessing, os, pathlib, struct, subprocess, sys
from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.tracing import attach
from tests.support import workers

model, endpoint = sys.argv[1:3]
if os.environ.get("SGL_ASPECTS_RECORDER") == "sdk":
    from opentelemetry import metrics, trace
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint + "/v1/traces")))
    trace.set_tracer_provider(provider)
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint + "/v1/metrics"), 200)
    metrics.set_meter_provider(MeterProvider([reader]))


def jump(seconds):
    with open(os.environ["WALL_CLOCK"], "r+b") as file:
        file.write(struct.pack("<q", seconds))


if __name__ == "__main__":
    tokens = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with attach(level=3, endpoint=endpoint) as session, Engine(model_path=model) as engine:
        for number, seconds in enumerate(map(int, sys.argv[3:])):
            handle = engine.submit("hello", tokens, rid=f"r{number}")
            chunks = iter(handle)
            next(chunks)
            jump(seconds)
            if session.run_folder:
                begun = workers.record_like_a_scheduler, (session.run_folder, [f"r{number}"], "end")
                late = multiprocessing.get_context("spawn").Process(target=begun[0], args=begun[1])
                late.start()
                late.join()
                command = [sys.executable, "-m", "sgl_aspects"]
                subprocess.run([*command, "dump", "--run", session.run_folder, "--last", "300"], check=True)
                subprocess.run([*command, "top", "--run", session.run_folder, "--once"], check=True)
            for chunk in chunks:
                pass
    if not session.run_folder:
        provider.shutdown()
        metrics.get_meter_provider().shutdown()
"""


model = llama_fixture(max_position_embeddings=1024)


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    return wall_clock(tmp_path)


@pytest.mark.parametrize(
    ("recorder", "compiled"),
    [
        ("ring", "on"),
        *(pytest.param(*words, marks=pytest.mark.slow) for words in (("ring", "off"), ("sdk", "on"))),
    ],
)
def test_jumps_while_requests_are_served(
    recorder: str, compiled: str, model: Path, clock: WallClock, receiver: Receiver, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    variables = {"SGL_ASPECTS_RECORDER": recorder, "SGL_ASPECTS_NATIVE": compiled, "PYTHONPATH": str(ROOT)}
    begin = time.time_ns()
    jumps = str(-YEAR), str(HOUR)
    output_of(python(program, model, receiver.endpoint, *jumps, **clock.environment, **variables))
    end = time.time_ns()
    spans = receiver.spans
    requests = [span for span in spans if "gen_ai.response.finish_reasons" in span.attributes]
    assert {span.attributes["gen_ai.request.id"] for span in requests} == {"r0", "r1"}
    wrong = [span for span in spans if not begin <= span.start <= span.end <= end]
    assert wrong == []
    assert {"decode", "scheduler.step", "forward"} <= {span.name for span in spans}
    for request in requests if recorder == "ring" else []:
        parts = [span for span in spans if span.trace_id == request.trace_id and span is not request]
        assert len(parts) > 4
        assert min(part.start for part in parts) >= request.start
    for name in ("gen_ai.server.request.duration", "sgl_aspects.step.duration"):
        points = receiver.points(name)
        assert points
        assert sum(point.value for point in points) < (end - begin) / 1e9 * len(points)
