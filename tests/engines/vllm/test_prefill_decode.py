"""Real vLLM with prefill and decode on two servers: NIXL sends keys and values over loopback
(make test-vllm).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl", reason="KV transfer of vLLM on the CPU is by NIXL")

from tests.support.engine_server import EngineServer
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import engine_receiver
from tests.support.processes import free_port
from tests.support.sglang_models import make_mini
from tests.support.vllm_server import serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

NAME = "text_completion mini"

# NIXL's threads and vLLM's workers wait by calling sched_yield in a loop. Where there are as many of them as
# cores, Linux 6.18 ran nothing else for up to a minute, with tracing and without: here they sleep instead.
YIELD = """
#include <time.h>
int sched_yield(void) { struct timespec pause = {0, 100000}; return nanosleep(&pause, 0); }
"""


class Cluster(NamedTuple):
    prefill: EngineServer
    decode: EngineServer
    receiver: Receiver

    def complete(self, prompt: str, *, headers: dict[str, str] | None = None, tokens: int = 12) -> Any:
        """Ask one server, then the other, as a balancer of vLLM does."""
        request = {"model": "mini", "prompt": prompt, "temperature": 0}
        first = {**request, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        parameters = self.prefill.post("/v1/completions", first, headers)["kv_transfer_params"]
        second = {**request, "max_tokens": tokens, "kv_transfer_params": parameters}
        return self.decode.post("/v1/completions", second, headers)

    def spans(self, trace_id: str) -> dict[str, list[Span]]:
        """The spans of the trace in both servers, each in order; waits for both requests and all phases."""

        def is_whole(spans: list[Span]) -> bool:
            own = [span.name for span in spans if span.trace_id == trace_id]
            return own.count(NAME) == own.count("kv_transfer") == 2 and "decode" in own

        self.receiver.wait_for(is_whole)
        found: dict[str, list[Span]] = {}
        for span in sorted(self.receiver.spans, key=lambda span: span.start):
            if span.trace_id == trace_id:
                found.setdefault(str(span.resource["sgl_aspects.disaggregation.mode"]), []).append(span)
        return found


def sleeping_yield(folder: Path) -> Path:
    """Build a library to preload, in which `sched_yield` sleeps for 100 microseconds."""
    library = folder / "sleeping_yield.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(library), "-"]
    subprocess.run(command, input=YIELD, text=True, check=True)
    return library


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    model = make_mini(folder / "mini")
    preloaded = str(sleeping_yield(folder))
    with engine_receiver() as receiver, ExitStack() as stack:
        servers: list[EngineServer] = []
        for mode, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            environment = {
                "LD_PRELOAD": preloaded,
                "SGL_ASPECTS_TRACE": "3",
                "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "VLLM_CACHE_ROOT": str(folder / f"{mode}-cache"),
            }
            transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
            options = ["--dtype", "float32", "--enforce-eager", "--kv-transfer-config", json.dumps(transfer)]
            server = serve(model, folder / mode, more=options, environment=environment)
            servers.append(stack.enter_context(server))
        yield Cluster(servers[0], servers[1], receiver)


def phases(spans: list[Span]) -> list[str]:
    (root,) = [span for span in spans if span.name == NAME]
    names = ("queue", "prefill", "kv_transfer", "decode")
    return [span.name for span in spans if span.parent_id == root.span_id and span.name in names]


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_request_of_two_servers_is_one_trace(cluster: Cluster, is_traced: bool) -> None:
    headers = {"traceparent": f"00-{7:032x}-{9:016x}-01"} if is_traced else {}
    prompt = f"count {list(range(40))} {is_traced}"
    answer = cluster.complete(prompt, headers=headers)
    alone = {"model": "mini", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    assert answer["choices"] == cluster.prefill.post("/v1/completions", alone)["choices"]

    def root(spans: list[Span]) -> Span | None:
        return next(
            (span for span in spans if span.attributes.get("gen_ai.response.id") == answer["id"]), None
        )

    cluster.receiver.wait_for(lambda spans: root(spans) is not None)
    below = root(cluster.receiver.spans)
    assert below is not None
    found = cluster.spans(below.trace_id)
    assert phases(found["prefill"]) == ["queue", "prefill", "kv_transfer"]
    assert phases(found["decode"]) == ["queue", "kv_transfer", "queue", "prefill", "decode"]
    (above,) = [span for span in found["prefill"] if span.name == NAME]
    if is_traced:
        assert int(below.trace_id, 16) == 7
        assert int(above.parent_id, 16) == int(below.parent_id, 16) == 9
    else:
        assert not int(above.parent_id or "0", 16)
        assert below.parent_id == above.span_id
    assert {span.resource["service.name"] for span in found["prefill"]} == {"mini-prefill"}
    assert {span.resource["service.name"] for span in found["decode"]} == {"mini-decode"}
    for span in found["prefill"] + found["decode"]:
        assert span.resource["sgl_aspects.disaggregation.transfer_backend"] == "NixlConnector"
    # The decode server fetches what the prefill server computed, which keeps it until it was fetched.
    by_name = {mode: {span.name: span for span in spans} for mode, spans in found.items()}
    sending, receiving = by_name["prefill"]["kv_transfer"], by_name["decode"]["kv_transfer"]
    assert sending.start == by_name["prefill"]["prefill"].end <= receiving.start
    assert receiving.start < receiving.end <= by_name["decode"]["prefill"].start
    assert receiving.start < sending.end
