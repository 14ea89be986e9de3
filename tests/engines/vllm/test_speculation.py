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

from sgl_aspects.analysis.causes import Causes
from sgl_aspects.analysis.spans import read_spans
from tests.support.callers import CALLER, by_trace, parent, trace_id
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import engine_receiver
from tests.support.processes import wait_until
from tests.support.sglang_models import make_eagle, make_mini
from tests.support.streams import Stream
from tests.support.vllm_server import serve, traced

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

DRAFT_TOKENS = 3
REQUESTS, TOKENS = 3, 300
_NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@dataclass
class Run:
    """``metrics``: vLLM's own page. ``seen``: a client's times between the parts of each answer."""

    receiver: Receiver
    metrics: str
    causes: Causes
    seen: list[list[float]]

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
    file = log.with_suffix(".jsonl")
    body = {
        "model": "mini",
        "prompt": "a fox a fox a fox",
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    body["max_tokens"] = TOKENS
    with engine_receiver() as receiver:
        options = ["--dtype", "float32", "--enforce-eager", "--speculative-config", json.dumps(config)]
        environment = traced(receiver)
        environment |= {"OTEL_TRACES_EXPORTER": "otlp,otlp-json-file", "SGL_ASPECTS_TRACE_FILE": str(file)}
        with serve(model, log, more=options, environment=environment) as server:
            # A prompt of one token, which has places for drafts beside it: they are none of its tokens.
            server.post("/v1/completions", {**body, "prompt": "b", "stream": False, "max_tokens": 8})
            seen = []
            for number in range(REQUESTS):
                stream = Stream(server.port, "/v1/completions", body, parent(number), 0.0)
                stream.read()
                seen.append(stream.gaps)
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as response:
                metrics = response.read().decode()
            receiver.wait_for(lambda spans: trace_id(REQUESTS - 1) in {span.trace_id for span in spans})
    wait_until(lambda: sum(span.parent_id == CALLER for span in read_spans(file)) == REQUESTS, 60)
    return Run(receiver, metrics, Causes(read_spans(file)), seen)


def test_a_step_of_several_tokens_is_one_time_between_tokens_as_a_client_sees_it(run: Run) -> None:
    """As many, and they add up, in at least one of the answers: others may be at work on this machine."""
    found = []
    for number, seen in enumerate(run.seen):
        (request,) = run.causes.find(trace_id(number))
        gaps = [gap.seconds for gap in run.causes.gaps(request)]
        assert len(gaps) < TOKENS - 1
        found.append((len(gaps), len(seen), sum(gaps), sum(seen)))
    assert any(
        ours == theirs and told == pytest.approx(client, rel=0.1) for ours, theirs, told, client in found
    ), found


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
