"""Two nodes of one engine, and two replicas, of real SGLang: each with a run and a collector of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang")

from tests.support.phases import engine_receiver
from tests.support.sglang_cluster import nodes, replicas, traced
from tests.support.sglang_models import make_mini

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

BODY = {
    "text": "the quick brown fox",
    "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mini(tmp_path_factory.mktemp("models") / "mini")


def test_the_steps_of_every_node_are_linked_to_their_requests(model: Path, tmp_path: Path) -> None:
    callers = [f"{number + 1:032x}" for number in range(3)]
    with engine_receiver() as receiver:
        with nodes(model, tmp_path, traced(receiver.endpoint)) as servers:
            for trace in callers:
                servers[0].post("/generate", BODY, {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
            servers[0].post("/generate", BODY)
        receiver.wait_for(
            lambda spans: (
                {s.resource.get("sgl_aspects.node.rank") for s in spans if s.name == "forward"} == {0, 1}
            )
        )
    roots = {span.span_id: span for span in receiver.spans if span.kind == 2}
    assert {span.resource["sgl_aspects.node.rank"] for span in roots.values()} == {0}
    for trace in callers:
        of_request = [span.name for span in receiver.spans if span.trace_id == trace]
        assert sorted(of_request) == sorted(  # the answering rank records its phases, once
            ["text_completion mini", "tokenize", "queue", "prefill", "decode", "detokenize"]
        )
    for rank in (0, 1):
        steps = [s for s in receiver.named("scheduler.step") if s.resource["sgl_aspects.node.rank"] == rank]
        assert {span.resource["sgl_aspects.rank"][:3] for span in steps} == {f"tp{rank}"}
        linked = {span_id for step in steps for _, span_id in step.links}
        mine = {s.span_id for s in roots.values() if s.trace_id in callers}
        assert mine <= linked, f"node {rank}"


def test_replicas_are_distinct(model: Path, tmp_path: Path) -> None:
    with engine_receiver() as receiver:
        with replicas(model, tmp_path, traced(receiver.endpoint, level=1)) as servers:
            for number, server in enumerate(servers):
                caller = {"traceparent": f"00-{number + 1:032x}-00f067aa0ba902b7-01"}
                server.post("/generate", BODY, caller)
        receiver.wait_for(
            lambda spans: {f"{n + 1:032x}" for n in range(2)} <= {s.trace_id for s in spans if s.kind == 2}
        )
    for number in range(2):
        spans = [span for span in receiver.spans if span.trace_id == f"{number + 1:032x}"]
        assert {span.resource["service.name"] for span in spans} == {"mini"}
        assert len({span.resource["service.instance.id"] for span in spans}) == 1
    assert len({span.resource["service.instance.id"] for span in receiver.spans}) == 2
