"""Real vLLM with speculation: what steps and requests say of drafts is what vLLM counts (make test-vllm)."""

from __future__ import annotations

import json
import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.support.callers import by_trace, parent, trace_id
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import engine_receiver
from tests.support.sglang_models import make_eagle, make_mini
from tests.support.vllm_server import serve, traced

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

DRAFT_TOKENS = 3
_NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@dataclass
class Run:
    receiver: Receiver
    metrics: str  # vLLM's own page

    def theirs(self, name: str) -> list[tuple[str, float]]:
        """Return labels and value of each line of a metric of vLLM's."""
        pattern = rf"^vllm:spec_decode_num_{name}_total\{{(.*)\}} (.*)$"
        return [(found[0], float(found[1])) for found in re.findall(pattern, self.metrics, re.MULTILINE)]

    def ours(self, spans: list[Span], name: str) -> int:
        found = (span.attributes.get(f"sgl_aspects.speculation.{name}_tokens", 0) for span in spans)
        return int(sum(found))


@pytest.fixture(scope="module", params=["ngram", "eagle"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    model = make_mini(folder / "mini")
    config: dict[str, Any] = _NGRAM
    if request.param == "eagle":
        config = {"method": "eagle", "model": str(make_eagle(model, folder / "eagle"))}
    return served(model, folder / "log", {**config, "num_speculative_tokens": DRAFT_TOKENS})


def served(model: Path, log: Path, config: dict[str, Any]) -> Run:
    with engine_receiver() as receiver:
        options = ["--dtype", "float32", "--enforce-eager", "--speculative-config", json.dumps(config)]
        with serve(model, log, more=options, environment=traced(receiver)) as server:
            body = {"model": "mini", "prompt": "a fox a fox a fox", "ignore_eos": True, "temperature": 0}
            for number in range(3):
                server.post("/v1/completions", {**body, "max_tokens": 300 + number}, parent(number))
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
                metrics = response.read().decode()
            receiver.wait_for(lambda spans: trace_id(2) in {span.trace_id for span in spans})
    return Run(receiver, metrics)


def test_drafts_of_requests_steps_and_metrics_are_those_that_vllm_counts(run: Run) -> None:
    decodes, steps = run.receiver.named("decode"), run.receiver.named("scheduler.step")
    for name, theirs in (("drafted", "draft"), ("accepted", "accepted")):
        ((_, counted),) = run.theirs(f"{theirs}_tokens")
        assert run.ours(decodes, name) == run.ours(steps, name) == counted
        points = run.receiver.points(f"sgl_aspects.speculation.{name}_tokens")
        assert sum(point.value for point in points) == counted
    assert run.ours(decodes, "drafted") > 0
    fed = sum(step.attributes["sgl_aspects.batch.tokens"] for step in steps)
    assert fed >= run.ours(steps, "drafted")  # each was fed to the model


def test_acceptance_by_position_is_vllms(run: Run) -> None:
    points = run.receiver.points("sgl_aspects.speculation.accepted_tokens")
    ours = {int(p.attributes["sgl_aspects.speculation.position"]): p.value for p in points}
    for labels, counted in run.theirs("accepted_tokens_per_pos"):
        (position,) = re.findall(r'position="(\d+)"', labels)
        assert ours.get(int(position), 0) == counted


def test_drafting_has_its_time_in_the_step(run: Run) -> None:
    traces = by_trace(run.receiver.spans)
    steps = [
        step
        for step in run.receiver.named("scheduler.step")
        if step.attributes.get("sgl_aspects.speculation.drafted_tokens")
    ]
    assert steps
    for step in steps:
        (draft,) = [span for span in traces[step.trace_id] if span.name == "draft"]
        (forward,) = [span for span in traces[step.trace_id] if span.name == "forward"]
        assert forward.end <= draft.start < draft.end
        assert draft.parent_id == forward.parent_id
