"""Speculation in any engine: spans and counts of drafts; the pass of a step is the one that verifies."""

from __future__ import annotations

import os
from contextlib import nullcontext
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from sgl_aspects.engines import SGLANG, VLLM, Engine, Role
from sgl_aspects.run.control import write_asked
from sgl_aspects.run.requests import Request
from sgl_aspects.tracing import observers, schema
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.export.metrics import EngineMetrics
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.draft import DraftObserver
from sgl_aspects.tracing.observers.forward import ForwardObserver
from sgl_aspects.tracing.observers.queue import QueueObserver
from sgl_aspects.tracing.observers.steps import StepObserver
from sgl_aspects.tracing.options import DEFAULTS
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.recorder import Recorder
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import SpanEnd, SpanType
from sgl_aspects.tracing.schema import ACCEPTED_AT, ACCEPTED_TOKENS, BATCH_TOKENS, DRAFTED_TOKENS
from tests.support.memory_recorder import Memory
from tests.support.rings import read_all
from tests.support.speculating import speculate
from tests.support.stand_ins import ForwardMode
from tests.support.stepping import Loop


def loop_of(engine: Engine, recorder: Recorder) -> Loop:
    trackers = Trackers.of(engine, recorder, DEFAULTS)
    forward = ForwardObserver(trackers)
    drafts, queue = DraftObserver(trackers, forward), QueueObserver(trackers)
    observers: tuple[Any, ...] = (StepObserver(trackers), forward, drafts, queue)
    return Loop(each for observer in observers for each in observer.observations())


def step(recorder: Recorder, accepted: int) -> None:
    """Run a step of SGLang's for two requests, with three drafted tokens each.

    It is a draft of two passes, the pass that verifies it, and one in which the draft model is fed.
    """
    loop, runner = loop_of(SGLANG, recorder), SimpleNamespace(device="cpu")
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, reqs=[], batch_size=2, forward_iter=1)
    batch.reqs = [
        SimpleNamespace(rid="a", finished_reason=None),
        SimpleNamespace(rid="b", finished_reason=None),
    ]
    result = SimpleNamespace(speculative_num_draft_tokens=4)
    with loop.call("run_batch", None, batch, result=result):
        for role, count in (("draft", 2), ("", 1), ("draft_extend", 1)):
            with loop.call(role) if role else nullcontext():
                for _ in range(count):
                    with loop.call("forward", runner, batch):
                        pass
    with loop.call("process_batch_result", SimpleNamespace(), batch, result):
        result.num_correct_drafts_per_req_cpu = [accepted - 1, 1]


class Speculator:
    """A scheduler whose steps are a draft of two passes, and the pass that verifies it."""

    device, model = "cpu", torch.nn.Identity()

    def run(self, batch: Any) -> None:
        self.draft(batch)
        self.forward(batch)

    def draft(self, batch: Any) -> None:
        for _ in range(2):
            self.forward(batch)

    def forward(self, batch: Any) -> None:
        self.model(torch.ones(2) + 1)


def test_a_profile_has_the_passes_that_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roles = {
        "run_batch": Role((f"{__name__}:Speculator.run",), ("_", "batch")),
        "draft": Role((f"{__name__}:Speculator.draft",)),
        "forward": Role((f"{__name__}:Speculator.forward",), ("model_runner", "batch")),
    }
    attributes = {"batch.mode": lambda batch: "decode", "batch.reqs": lambda batch: ["r"]}
    attributes["model_runner.model"] = lambda runner: runner.model
    monkeypatch.setattr(observers, "find_engines", lambda: [Engine("hare", "hare", roles, attributes)])
    recorder = RingRecorder(str(tmp_path), level=3)
    undo = observers.weave_observers(recorder)
    scheduler, asked = Speculator(), Request(tmp_path, os.getpid(), "profile", {"steps": 2})
    try:
        scheduler.run("first")
        write_asked(*tmp_path.glob("*.ring"))
        steps = []
        for batch in ("second", "third"):
            scheduler.run(batch)
            steps.append((asked.read() or {})["steps"])
    finally:
        for each in reversed(undo):
            each()
        asked.remove()
        recorder.close()
    assert steps == [1, 2]
    spans = [each for each in read_all(RunReader(str(tmp_path))) if isinstance(each, SpanEnd)]
    passes = {span.span_id for span in spans if span.type.name == "forward"}
    assert len(passes) == 3
    kernels = {span.parent_id for span in spans if span.type.name == "kernel"}
    assert len(kernels) == 2
    assert kernels < passes


def values_of(recorder: Memory, name: str) -> list[dict[str, Any]]:
    return [dict(zip(span.type.attributes, span.values)) for span in recorder.named(name)]


def test_the_forward_pass_of_a_step_is_the_one_that_verifies(tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path))
    step(recorder, accepted=3)
    recorder.close()
    records = read_all(RunReader(str(tmp_path)))
    spans = {record.type.name: record for record in records if isinstance(record, SpanEnd)}
    run_batch, *inside = (spans[name] for name in ("run_batch", "draft", "forward", "draft_extend"))
    times = [time for span in inside for time in (span.start_ns, span.end_ns)]
    times = [run_batch.start_ns, *times, run_batch.end_ns]
    assert times == sorted(times)
    for span in inside:
        assert (span.root_id, span.parent_id) == (run_batch.root_id, run_batch.span_id)


def test_a_step_counts_what_was_drafted_and_accepted() -> None:
    recorder = Memory()
    step(recorder, accepted=3)
    (span,) = recorder.named("scheduler.step")
    values = dict(zip(span.type.attributes, span.values))
    assert values[DRAFTED_TOKENS] == 2 * 3
    assert values[ACCEPTED_TOKENS] == 3
    assert values[BATCH_TOKENS] == 2 + 2 * 3


def test_drafts_of_steps_and_requests_are_those_that_the_engine_counts() -> None:
    recorder = Memory()
    for engine in speculate(recorder):
        steps = values_of(recorder, "scheduler.step")
        assert sum(step[DRAFTED_TOKENS] or 0 for step in steps) == engine.drafted > 0
        assert sum(step[ACCEPTED_TOKENS] or 0 for step in steps) == engine.accepted > 0
        decodes = values_of(recorder, "decode")
        if engine.accepted_at:
            assert sum(each[DRAFTED_TOKENS] or 0 for each in decodes) == engine.drafted
            found = zip_longest(*(each[ACCEPTED_AT] or () for each in decodes), fillvalue=0)
            assert {at: sum(counts) for at, counts in enumerate(found)} == engine.accepted_at
        recorder.ended.clear()


def test_a_plain_step_says_nothing_of_drafts() -> None:
    recorder = Memory()
    loop = loop_of(SGLANG, recorder)
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, reqs=[], batch_size=2, forward_iter=1)
    for _ in range(3):  # the later ones by the compiled path, where there is one
        loop.step(batch)
    steps = [dict(zip(step.type.attributes, step.values)) for step in recorder.named("scheduler.step")]
    assert [values[DRAFTED_TOKENS] for values in steps] == [None] * 3


def test_a_draft_in_another_process_belongs_to_the_step_of_the_latest_pass() -> None:
    recorder = Memory()
    loop = loop_of(VLLM, recorder)
    batch = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["a"], num_computed_tokens=[5], num_output_tokens=[2], resumed_req_ids=()
        ),
        num_scheduled_tokens={"a": 1},
        total_num_scheduled_tokens=1,
        scheduled_spec_decode_tokens={},
    )
    runner = SimpleNamespace(device="meta")
    for role, args in (("forward", (runner, batch)), ("draft", (runner,))):
        with loop.call(role, *args):
            pass
    (draft,) = recorder.named("draft")
    step_id = VLLM.reader("batch.shared_id")(batch)
    assert (draft.root_id, draft.parent_id) == (step_id, layout.child_id(step_id, layout.CHILD_RUN_BATCH))


def test_drafts_of_a_preempted_request_are_counted_in_the_phase_in_which_they_were_made() -> None:
    recorder = Memory()
    requests = Trackers.of(SGLANG, recorder, DEFAULTS).requests
    request = requests.queued("a")
    requests.enter("a", "decode")
    requests.drafts("a", (9, [3, 1]))
    requests.preempted("a", 8)
    requests.resume(request, 0)
    requests.drafts("a", (15, [5, 2, 1]))
    requests.finished("a", 20, "length")
    values = [dict(zip(span.type.attributes, span.values)) for span in recorder.named("decode")]
    assert [each[DRAFTED_TOKENS] for each in values] == [9, 6]
    assert [each[ACCEPTED_AT] for each in values] == [[3, 1], [2, 1, 1]]
    assert [each[ACCEPTED_TOKENS] for each in values] == [4, 4]


@pytest.mark.parametrize("value", [None, "x", -1, 1 << 63, 1 << 70, 1e300, float("nan"), True, [1], {}])
def test_a_value_that_is_no_count_costs_the_metrics_it_alone(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """They come from engines: raised in the collector, or at the export, an error would end the others."""
    reader = InMemoryMetricReader()
    metrics = EngineMetrics(MeterProvider([reader]).get_meter("test"))

    def ended(name: str, **values: Any) -> SpanEnd:
        attributes = {str(getattr(schema, key)): values[key] for key in values}
        return SpanEnd(
            SpanType(name, dict.fromkeys(attributes, object)), 1, 1, 0, 1, 2, [*attributes.values()]
        )

    metrics.step_ended("one", 1, ended("scheduler.step", QUEUE_RUNNING=value, QUEUE_WAITING=7))
    metrics.step_ended(
        "one",
        1,
        ended("scheduler.step", QUEUE_RUNNING=value, QUEUE_WAITING=7, MODE="decode", BATCH_TOKENS=value),
    )
    metrics.decode_ended(ended("decode", DRAFTED_TOKENS=4, ACCEPTED_TOKENS=value, ACCEPTED_AT=[2, 1]))
    metrics.decode_ended(ended("decode", DRAFTED_TOKENS=value, ACCEPTED_TOKENS=3, ACCEPTED_AT=[2, 1]))
    metrics.decode_ended(ended("decode", DRAFTED_TOKENS=4, ACCEPTED_TOKENS=3, ACCEPTED_AT=[2, value]))
    data = reader.get_metrics_data()
    assert data is not None
    encode_metrics(data).SerializeToString()
    found = {
        metric.name: metric.data.data_points for metric in data.resource_metrics[0].scope_metrics[0].metrics
    }
    counts = {name: [getattr(point, "value", 1) for point in points] for name, points in found.items()}
    assert counts[schema.QUEUE_WAITING] == [7]
    assert counts[schema.ACCEPTED_TOKENS] == [2]
    assert schema.QUEUE_RUNNING not in counts
    assert schema.STEP_TOKENS not in counts
    assert caplog.records == []
