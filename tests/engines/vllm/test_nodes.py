"""Real vLLM over two nodes, each a run of its own: passes of both belong to the steps that the first one
scheduled, and replicas of both to requests that the first one received (make test-vllm).
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.support.engine_server import EngineServer, start_server
from tests.support.otlp_receiver import http_receiver
from tests.support.phases import engine_receiver
from tests.support.processes import free_port
from tests.support.sglang_models import make_mini
from tests.support.vllm_server import ENVIRONMENT, VLLM_SERVE, serve, traced

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]


def test_passes_of_both_nodes_belong_to_the_steps_of_the_first(tmp_path: Path) -> None:
    """The executors are vLLM's own; with Ray vLLM 0.32 does not run on the CPU."""
    model = make_mini(tmp_path / "mini")
    options = ["--tensor-parallel-size", "2", "--dtype", "float32", "--enforce-eager", "--nnodes", "2"]
    options += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    options += ["--distributed-executor-backend", "mp", "--max-model-len", "1024"]
    with engine_receiver() as receiver:
        environment = {
            "SGL_ASPECTS_TRACE": "3",
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        second = [*VLLM_SERVE, str(model), "--served-model-name", "mini", *options]
        second += ["--node-rank", "1", "--headless"]
        own = {**ENVIRONMENT, **environment, "VLLM_CACHE_ROOT": str(tmp_path / "second-cache")}
        log = tmp_path / "second"
        with start_server(EngineServer, second, 0, log, own, waits=False):
            environment["VLLM_CACHE_ROOT"] = str(tmp_path / "first-cache")
            more = [*options, "--node-rank", "0"]
            with serve(model, tmp_path / "first", more=more, environment=environment) as server:
                answers = server.chats([f"number {number}" for number in range(4)], [{}] * 4)
                receiver.wait_for(lambda spans: sum(span.name == "chat mini" for span in spans) == 4)
                receiver.wait_for(
                    lambda spans: (
                        sum(span.name == "forward" for span in spans)
                        == 2 * sum(span.name == "scheduler.step" for span in spans)
                    )
                )
    assert all(answer.usage["completion_tokens"] for answer in answers)
    launches = {span.span_id: span for span in receiver.named("run_batch")}
    places: dict[str, set[tuple[str, int]]] = {each: set() for each in launches}
    for forward in receiver.named("forward"):
        assert forward.trace_id == launches[forward.parent_id].trace_id
        rank, node = (forward.attributes[f"sgl_aspects.{name}"] for name in ("rank", "node.rank"))
        places[forward.parent_id].add((rank, node))
    assert len(places) >= 8
    for found in places.values():
        assert found == {("tp0 pp0 dp0", 0), ("tp1 pp0 dp0", 1)}
    assert {span.resource["sgl_aspects.node.rank"] for span in receiver.named("chat mini")} == {0}


def test_requests_have_their_phases_on_the_node_of_their_replica(tmp_path: Path) -> None:
    model = make_mini(tmp_path / "mini")
    options = ["--data-parallel-size", "2", "--data-parallel-size-local", "1", "--dtype", "float32"]
    options += ["--enforce-eager", "--data-parallel-address", "127.0.0.1"]
    options += ["--data-parallel-rpc-port", str(free_port())]
    # Not by the whole rule of phases: a request has vLLM's own times of another host.
    with http_receiver() as receiver:
        environment = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1", **traced(receiver)}
        second = [*VLLM_SERVE, str(model), "--served-model-name", "mini", "--max-model-len", "1024", *options]
        second += ["--headless", "--data-parallel-start-rank", "1"]
        own = {**ENVIRONMENT, **environment}
        with (
            start_server(EngineServer, second, 0, tmp_path / "second", own, waits=False),
            serve(model, tmp_path / "first", more=options, environment=environment) as server,
        ):
            server.chats([f"number {number}" for number in range(8)], [{}] * 8)
            receiver.wait_for(lambda spans: sum(span.name == "decode" for span in spans) == 8)
            receiver.wait_for(lambda spans: sum(span.name == "chat mini" for span in spans) == 8)
    roots = {span.span_id: span for span in receiver.named("chat mini")}
    for phase, time in (("queue", "queue"), ("prefill", "model_prefill"), ("decode", "model_decode")):
        spans = receiver.named(phase)
        for span in spans:
            seconds = roots[span.parent_id].attributes[f"gen_ai.latency.time_in_{time}"]
            assert abs(seconds - (span.end - span.start) / 1e9) < 0.02
        assert {span.parent_id for span in spans} == roots.keys()
        assert all(span.trace_id == roots[span.parent_id].trace_id for span in spans)
        assert {span.resource["sgl_aspects.rank"] for span in spans} == {"dp0", "dp1"}
    linked = {link for step in receiver.named("scheduler.step") for _, link in step.links}
    assert linked == roots.keys()
