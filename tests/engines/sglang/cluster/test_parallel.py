"""Real SGLang whose engine has several ranks on one host: tensor, pipeline and data parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang")

from tests.support.phases import engine_receiver
from tests.support.sglang_cluster import LOOPBACK, traced
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

BODY = {
    "text": "the quick brown fox",
    "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0},
}
PHASES = ["queue", "prefill", "decode"]
#: The options, the ranks that there are, and those that run each request.
ENGINES = {
    "tensor": (["--tp-size", "2"], {"tp0", "tp1"}, 2),
    "pipeline": (["--pp-size", "2"], {"pp0", "pp1"}, 2),
    # With attention apart from the rest (--enable-dp-attention) SGLang requires pinned memory.
    "data": (["--dp-size", "2"], {"dp0", "dp1"}, 1),
}


@pytest.mark.parametrize("kind", list(ENGINES))
def test_the_steps_of_every_rank_are_linked_to_their_requests(kind: str, tmp_path: Path) -> None:
    options, ranks, ranks_of_request = ENGINES[kind]
    model = make_mini(tmp_path / "mini")
    environment = {**LOOPBACK, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    callers = [f"{number + 1:032x}" for number in range(4)]
    with engine_receiver() as receiver:
        with serve(
            model,
            tmp_path / "server.log",
            prefix=traced(receiver.endpoint),
            more=options,
            environment=environment,
        ) as server:
            for trace in callers:
                server.post("/generate", BODY, {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
        receiver.wait_for(lambda spans: set(callers) <= {span.trace_id for span in spans})
    roots = {span.trace_id: span for span in receiver.spans if span.kind == 2}
    steps = receiver.named("scheduler.step")
    said = {span.attributes["sgl_aspects.rank"] for span in steps}
    assert {rank for rank in ranks for each in said if rank in each.split()} == ranks, said
    for trace in callers:
        # The answering rank records the phases, once, although others run the request, too.
        names = [span.name for span in receiver.spans if span.trace_id == trace and span.name in PHASES]
        assert sorted(names) == sorted(PHASES)
        linked = {
            step.attributes["sgl_aspects.rank"]
            for step in steps
            if (trace, roots[trace].span_id) in step.links
        }
        assert len(linked) == ranks_of_request, (trace, linked)
    for step in steps:
        assert step.attributes["sgl_aspects.rank"] == step.resource["sgl_aspects.rank"]
        assert not step.is_error
