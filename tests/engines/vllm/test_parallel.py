"""Real vLLM with two workers, on the CPU: each rank's forward passes belong to the step that scheduled them
(make test-vllm).
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.support.phases import engine_receiver
from tests.support.sglang_models import make_mini
from tests.support.vllm_server import serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_each_rank_s_forward_passes_belong_to_the_step_that_scheduled_them(tmp_path: Path) -> None:
    """Pipeline parallelism cannot be run so: vLLM 0.32's CPU runner asserts on the second stage."""
    ranks = {"tp0 pp0 dp0", "tp1 pp0 dp0"}
    model = make_mini(tmp_path / "mini")
    with engine_receiver() as receiver:
        environment = {
            "SGL_ASPECTS_TRACE": "3",
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        }
        options = ["--tensor-parallel-size", "2", "--dtype", "float32", "--enforce-eager"]
        with serve(model, tmp_path / "log", more=options, environment=environment) as server:
            answers = server.chats([f"number {number}" for number in range(4)], [{}] * 4)
            receiver.wait_for(lambda spans: sum(span.name == "chat mini" for span in spans) == 4)
    assert all(answer.usage["completion_tokens"] for answer in answers)
    steps = {span.span_id: span for span in receiver.named("scheduler.step")}
    launches = {span.span_id: steps[span.parent_id] for span in receiver.named("run_batch")}
    passes: dict[str, list[str]] = {step_id: [] for step_id in steps}
    for forward in receiver.named("forward"):
        step = launches[forward.parent_id]
        passes[step.span_id].append(forward.resource["sgl_aspects.rank"])
        assert forward.attributes["sgl_aspects.batch.size"] == step.attributes["sgl_aspects.batch.size"]
    assert len(steps) >= 8
    for found in passes.values():
        assert sorted(found) == sorted(ranks)
