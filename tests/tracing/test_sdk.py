"""SGL_ASPECTS_RECORDER=sdk and off: the same spans by the application's own provider, or none."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.tracing import attach
from sgl_aspects.tracing.lifecycle import StepTracker
from tests.support.memory_recorder import Memory
from tests.support.processes import output_of, python
from tests.support.sessions import read_file
from tests.support.tiny_models import make_llama
from tests.support.torch_programs import run_with_torch

# In a process of its own: a provider is set once and for all.
PROGRAM = """
import json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sgl_aspects.runtime.engine import Engine
from sgl_aspects.runtime.sampling_params import SamplingParams
from sgl_aspects.tracing import attach, context
from sgl_aspects.tracing.records import RequestBegin, RequestElsewhere, RequestSeen, SpanType

if __name__ == "__main__":
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    with attach(level=3) as session:
        with Engine(model_path=sys.argv[1], max_total_tokens=256) as engine:
            headers = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"}
            sampling = SamplingParams(max_new_tokens=3, ignore_eos=True)
            engine.generate("hello", sampling, rid="r1", external_trace_header=headers)
        # As a scheduler in the same process records: the request known by a key, long before its spans end.
        recorder, step = session.recorder, SpanType("scheduler.step", {"size": int})
        recorder.write(RequestBegin(49, "r2", 1, *context.new(), "chat", {}))
        recorder.write(RequestSeen(50, "r2", 1))
        recorder.write(RequestElsewhere(51, 7, 9, True))
        recorder.write(RequestSeen(52, "r3", 1))
        for number in range(5000):
            recorder.spans(SpanType("earlier"))(1000 + number, 1000 + number, 0, 1, 2)
        recorder.enter(step, 60, 60, 0, 10)
        recorder.enter(SpanType("run_batch"), 61, 60, 60, 11)
        recorder.spans(SpanType("forward"))(62, 60, 61, 12, 13)
        recorder.spans(SpanType("run_batch"))(61, 60, 60, 11, 14, (), "ValueError")
        recorder.spans(step)(60, 60, 0, 10, 15, (1,), "", [50])
        for key, name in (50, "queue"), (51, "prefill"), (52, "decode"):
            recorder.spans(SpanType(name))(key + 20, key, key, 10, 11)
        recorder.spans(SpanType("chat"))(49, 49, 0, 1, 12)
        recorder.spans(SpanType("of another process's step"))(80, 1 << 63, 5 << 60, 10, 11)
    print(json.dumps([json.loads(span.to_json()) for span in memory.get_finished_spans()]))
"""


def test_the_application_s_provider_gets_the_spans(tmp_path: Path) -> None:
    make_llama(tmp_path / "tiny", max_position_embeddings=1024)
    begin = "import sys, warnings; warnings.simplefilter('error'); "
    begin += f"sys.argv[1:] = [{str(tmp_path / 'tiny')!r}]"
    environment = {**os.environ, "SGL_ASPECTS_RECORDER": "sdk"}
    status, printed, errors = run_with_torch(begin + PROGRAM, environment, tmp_path)
    assert status == 0, errors
    spans = {span["name"]: span for span in json.loads(printed.splitlines()[-1])}
    assert set(spans) == {
        "text_completion tiny",
        "tokenize",
        "detokenize",
        *("scheduler.step", "run_batch", "forward", "of another process's step"),
        *("chat", "queue", "prefill", "decode", "earlier"),
    }
    request = spans["text_completion tiny"]
    assert request["context"]["trace_id"] == "0x" + "ab" * 16
    assert request["parent_id"] == "0x" + "cd" * 8
    assert request["kind"] == "SpanKind.SERVER"
    assert request["attributes"]["gen_ai.usage.output_tokens"] == 3
    chat = spans["chat"]
    for name, parent in (("tokenize", request), ("detokenize", request), ("queue", chat)):
        assert spans[name]["context"]["trace_id"] == parent["context"]["trace_id"]
        assert spans[name]["parent_id"] == parent["context"]["span_id"]
    assert spans["prefill"]["context"]["trace_id"] == f"0x{7:032x}"
    assert spans["prefill"]["parent_id"] == f"0x{9:016x}"
    assert spans["decode"]["parent_id"] is None
    assert spans["decode"]["attributes"] == {"gen_ai.request.id": "r3"}
    assert spans["of another process's step"]["parent_id"] is None
    step, run, forward = spans["scheduler.step"], spans["run_batch"], spans["forward"]
    assert forward["parent_id"] == run["context"]["span_id"]
    assert run["parent_id"] == step["context"]["span_id"]
    assert run["status"]["status_code"] == "ERROR"
    assert step["parent_id"] is None
    assert step["attributes"] == {"size": 1}
    assert step["links"][0]["context"]["span_id"] == chat["context"]["span_id"]


SAMPLED = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Decision, ParentBased, Sampler, SamplingResult
from sgl_aspects.tracing import attach, context
from sgl_aspects.tracing.records import RequestBegin, SpanType

class OfOneModel(Sampler):
    def should_sample(self, parent_context, trace_id, name, kind=None, attributes=None, *more, **named):
        is_wanted = (attributes or {}).get("gen_ai.request.model") == "large"
        decision = Decision.RECORD_AND_SAMPLE if is_wanted else Decision.DROP
        return SamplingResult(decision, {"sampled.by": "model"})

    def get_description(self):
        return "of one model"

memory, provider = InMemorySpanExporter(), TracerProvider(sampler=ParentBased(OfOneModel()))
with attach(level=1) as session:
    recorder = session.recorder
    for number, model in enumerate(["small", "large", "small", "large"]):
        if number == 1:  # the application is in no hurry
            provider.add_span_processor(SimpleSpanProcessor(memory))
            trace.set_tracer_provider(provider)
        if number == 3:
            provider.shutdown()
        root = recorder.new_id()
        asked = {"gen_ai.request.model": model}
        recorder.write(RequestBegin(root, f"r{number}", 1, *context.new(), "chat", asked))
        recorder.spans(SpanType("tokenize"))(recorder.new_id(), root, root, 2, 3)
        recorder.spans(SpanType("request"))(root, root, 0, 1, 4)
print([(span.name, dict(span.attributes)) for span in memory.get_finished_spans()])
"""


def test_the_application_s_sampler_sees_a_requests_parameters() -> None:
    """It drops, a provider comes late, another is shut down early: none of that is an error."""
    ran = python("-W", "error", "-c", SAMPLED, SGL_ASPECTS_RECORDER="sdk")
    assert "Traceback" not in ran.stderr
    assert output_of(ran).strip() == str(
        [("tokenize", {}), ("chat", {"sampled.by": "model", "gen_ai.request.model": "large"})]
    )


# As two ranks that run the same batches, each in its process: one of them follows.
COUNTED = """
import sys
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from sgl_aspects.tracing import attach, context
from sgl_aspects.tracing.records import ProcessDescribed, RequestBegin
from sgl_aspects.tracing.schema import DECODE, FOLLOWER, RANK, REQUEST, STEP

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
with attach(level=3) as session:
    recorder = session.recorder
    recorder.write(ProcessDescribed({RANK: "tp1", **({FOLLOWER: True} if sys.argv[1] == "follows" else {})}))
    step = recorder.new_id()
    recorder.spans(STEP)(step, step, 0, 10, 20, [1, "decode", 1, 4, 0, 1, 0.5])
    recorder.spans(DECODE)(recorder.new_id(), step, step, 10, 20, [4, "stop", 3, 2])
    trace, whole, answers = context.new(), recorder.new_id(), [recorder.new_id() for _ in range(2)]
    recorder.write(RequestBegin(whole, "r", 10, *trace, "chat m", {"gen_ai.operation.name": "chat"}))
    for answer in answers:
        recorder.write(RequestBegin(answer, "r0", 11, trace.trace_id, whole, True, "", False, "chat m", {}))
    for each in (*answers, whole):
        recorder.spans(REQUEST)(each, each, 0, 10, 20, ["r", ["stop"], None, 7, 4])
data = reader.get_metrics_data().resource_metrics[0].scope_metrics
print({m.name: sum(getattr(p, "count", 1) for p in m.data.data_points) for s in data for m in s.metrics})
"""


@pytest.mark.parametrize("rank", ["answers", "follows"])
def test_metrics_count_what_they_count_with_the_ring(rank: str) -> None:
    """Steps of the rank that answers alone; drafts; and a request for two answers once."""
    printed = output_of(python("-W", "error", "-c", COUNTED, rank, SGL_ASPECTS_RECORDER="sdk"))
    counted = ast.literal_eval(printed)
    assert ("sgl_aspects.step.duration" in counted) is (rank == "answers")
    assert ("sgl_aspects.queue.running" in counted) is (rank == "answers")
    assert "sgl_aspects.speculation.accepted_tokens" in counted
    assert counted["gen_ai.server.request.duration"] == 1


def test_off_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGL_ASPECTS_RECORDER", "off")
    with attach(level=3) as session:
        assert session.run_folder == ""
        assert session.recorder.level == 0
    assert session.close().spans_recorded == 0


# A scheduler in this process, and the caller's side of its requests as its own process would record it.
SAME = """
import json, multiprocessing, os, sys, time
from collections import Counter
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sgl_aspects.tracing import attach, context
from sgl_aspects.tracing.records import RequestBegin, RequestSent, SpanType

if __name__ == "__main__":
    model, mode, file = sys.argv[1:]
    os.environ["SGL_ASPECTS_RECORDER"] = mode
    memory, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    trace.set_tracer_provider(provider)
    with attach(level=4, **({"file": file} if mode == "ring" else {})) as session:
        from sgl_aspects.runtime import SamplingParams, ServerArgs
        from sgl_aspects.runtime.messages import TokenizedRequest
        from sgl_aspects.runtime.scheduling.scheduler import Scheduler
        ours, theirs = multiprocessing.Pipe()
        scheduler = Scheduler(ServerArgs(model, max_total_tokens=256, chunked_prefill_size=8), theirs)
        recorder = session.recorder
        ends = []
        for number, rid in enumerate(("one", "two")):
            root, start = recorder.new_id(), time.monotonic_ns()
            recorder.write(RequestBegin(root, rid, start, *context.new(), "chat tiny", {"a": 1}))
            recorder.write(RequestSent(root))
            ends.append((root, start))
            params = SamplingParams(max_new_tokens=3, ignore_eos=True)
            scheduler.add_request(TokenizedRequest(rid, list(range(5, 15 + number)), params))
        while scheduler.waiting or scheduler.running:
            scheduler.step()
        for root, start in ends:
            recorder.spans(SpanType("request", {"b": int}))(root, root, 0, start, time.monotonic_ns(), [2])
        opened = RequestBegin(recorder.new_id(), "open", time.monotonic_ns(), *context.new(), "open", {})
        recorder.write(opened)
    print(json.dumps([json.loads(span.to_json()) for span in memory.get_finished_spans()]))
"""


def test_the_same_spans_as_with_the_ring(tmp_path: Path) -> None:
    """Names, parents, attributes and links of the same run, each with its own recorder."""
    make_llama(tmp_path / "tiny", max_position_embeddings=1024)
    file = tmp_path / "traces.jsonl"
    printed = {}
    for mode in ("sdk", "ring"):
        arguments = f"import sys; sys.argv[1:] = {[str(tmp_path / 'tiny'), mode, str(file)]}"
        status, printed[mode], errors = run_with_torch(arguments + SAME, os.environ, tmp_path)
        assert status == 0, errors
    sdk = json.loads(printed["sdk"].splitlines()[-1])
    names = {span["context"]["span_id"]: span["name"] for span in sdk}
    traces = {span["context"]["trace_id"] for span in sdk}
    from_sdk = Counter(
        (span["name"], names.get(span["parent_id"]), _attributes(span["attributes"]), len(span["links"]))
        for span in sdk
    )
    ring = [span for span in read_file(file) if span.name != "open"]
    names = {span.span_id: span.name for span in ring}
    from_ring = Counter(
        (span.name, names.get(span.parent_id), _attributes(span.attributes), len(span.links)) for span in ring
    )
    assert from_sdk == from_ring
    assert len(traces) == len({span.trace_id for span in ring})
    assert {"queue", "prefill", "decode", "scheduler.step", "forward", "chat tiny"} <= set(names.values())


def _attributes(values: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Times are not the same twice; only the collector has latencies."""
    return tuple(
        sorted(
            (key, type(value).__name__ if isinstance(value, float) else str(value))
            for key, value in values.items()
            if not key.startswith(("gen_ai.latency.time_", "sgl_aspects.latency."))
        )
    )


def test_a_process_that_ends_leaves_nothing_in_its_folder(tmp_path: Path) -> None:
    environment = {**os.environ, "SGL_ASPECTS_RECORDER": "sdk", "SGL_ASPECTS_TRACE": "1"}
    program = (
        "from sgl_aspects.tracing.session import attach_from_environment\nassert attach_from_environment()"
    )
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run(
        [sys.executable, "-c", program], env={**environment, "PYTHONPATH": path}, cwd=tmp_path, check=True
    )
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_current_begins_with_its_scheduling() -> None:
    """With the application's provider its span is begun then, and not at the step's end."""
    recorder, started = Memory(), dict[str, int]()
    recorder.open_span = lambda type, *fields: started.setdefault(type.name, fields[-1])  # type: ignore[method-assign,assignment]
    steps = StepTracker(recorder)
    steps.schedule_start, steps.schedule_end = 10, 20
    steps.begin(30, object(), "decode", 1, 1)
    assert steps.current_span() is not None
    assert started == {"scheduler.step": 10, "run_batch": 30}
    assert [span.start_ns for span in recorder.begun] == [10]
