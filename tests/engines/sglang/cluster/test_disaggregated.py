"""A prefill and a decode server of real SGLang, alone and behind balancers: one trace for each request."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("sglang_router")

from tests.support.callers import CALLER, parent, trace_id
from tests.support.distributions import install_plugin
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import engine_receiver
from tests.support.sglang_cluster import balancer, between, disaggregated, traced
from tests.support.sglang_models import make_mini


def _has_mooncake() -> bool:
    with suppress(OSError):
        for library in ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1"):
            ctypes.CDLL(library)
        return True
    return False


pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not _has_mooncake(), reason="mooncake's libraries are missing: make cluster-env"),
]

PREFILL_PHASES = ["bootstrap", "queue", "prefill", "kv_transfer"]
DECODE_PHASES = ["bootstrap", "kv_transfer", "queue", "decode"]
BALANCERS = {
    "router": [],
    "router with spans of its own": ["--enable-trace", "--otlp-traces-endpoint", "127.0.0.1:1"],
    "mini balancer": ["--mini-lb"],
}
# SGLang's own moments of each request, a line for each, on the clock of time.perf_counter.
STAMPS = """
import json, os, time
import sgl_aspects as aspects

@aspects.before("sglang.srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer.stream_output")
def note(streamer, reqs, *args, **kwargs):
    for req in reqs:
        if req.finished_reason is not None:
            stamps = {k: v for k, v in vars(req.time_stats).items() if k.endswith("_time") and v}
            line = {"rid": req.rid, "offset": time.time() - time.perf_counter(), **stamps}
            with open(os.environ["STAMPS"] + str(os.getpid()), "a") as file:
                file.write(json.dumps(line) + "\\n")

def activate():
    aspects.weave(note)
"""


@dataclass
class Run:
    """The servers' results; traces by their ids, requests by the test's names."""

    receiver: Receiver
    rooms: dict[str, int]
    answers: dict[str, dict[str, Any]]
    stamps: dict[str, dict[str, float]]
    rids: dict[str, str] = field(default_factory=dict)

    def of_room(self, name: str) -> list[Span]:
        """The trace of a request, by its room."""
        room = self.rooms[name]
        roots = [s for s in self.receiver.spans if s.attributes.get("sgl_aspects.bootstrap_room") == room]
        (trace_id,) = {span.trace_id for span in roots}
        return self.trace(trace_id)

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.receiver.spans if span.trace_id == trace_id]


def by_server(spans: list[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {"prefill": [], "decode": []}
    for span in sorted(spans, key=lambda span: span.start):
        found[span.resource["sgl_aspects.disaggregation.mode"]].append(span)
    return found


def root_of(spans: list[Span]) -> Span:
    (root,) = [span for span in spans if span.kind == 2]
    return root


def phases(spans: list[Span], names: list[str]) -> list[str]:
    return [span.name for span in spans if span.name in {*names, "prefill", "decode"}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    model = make_mini(tmp_path_factory.mktemp("models") / "mini")
    plugins = folder / "stamps"
    plugins.mkdir()
    install_plugin(plugins, "stamps", STAMPS)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")]),
        "STAMPS": str(folder / "stamps-"),
        "OTEL_METRIC_EXPORT_INTERVAL": "1000",
    }
    body = {
        "text": "the quick brown fox jumps over the lazy dog",
        "stream": True,
        "sampling_params": {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0},
    }
    whole = {"model": "mini", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    with engine_receiver() as receiver, ExitStack() as stack:
        servers = stack.enter_context(
            disaggregated(model, folder, traced(receiver.endpoint), environment=environment)
        )
        rooms = {"alone": 0x1234567890ABCD01, "called": 0x1234567890ABCD02, "left": 0x1234567890ABCD03}
        answers = {
            "alone": servers.post(body, rooms["alone"], {"x-request-id": "from-the-caller"}),
            "called": servers.post(body, rooms["called"], parent(1)),
        }
        for number, (name, words) in enumerate(BALANCERS.items()):
            with balancer(folder / f"balancer{number}.log", *between(servers), *words) as front:
                headers = {"x-request-id": f"{name} alone"}
                answers[f"{name}, alone"] = front.post("/v1/chat/completions", whole, headers)
                headers = {**parent(10 + number), "x-request-id": f"{name} called"}
                answers[f"{name}, called"] = front.post("/v1/chat/completions", whole, headers)
        time.sleep(2)  # idle: the gauges show it
        long = {**body, "sampling_params": {"max_new_tokens": 700, "ignore_eos": True}}
        servers.leave(long, rooms["left"])
        # The prefill server dies before it got the request: the decode server's wait fails.
        os.killpg(servers.prefill.process.pid, signal.SIGKILL)
        rooms["lost"] = 0x1234567890ABCD04
        answers["lost"] = servers.post_to_decode(body, rooms["lost"])
        receiver.wait_for(
            lambda spans: any(
                s.attributes.get("sgl_aspects.bootstrap_room") == rooms["lost"] and s.kind == 2 for s in spans
            )
        )
        stack.close()
        time.sleep(1)
        stamps: dict[str, dict[str, float]] = {}
        for file in folder.glob("stamps-*"):
            for line in file.read_text().splitlines():
                stamp = json.loads(line)
                stamps[stamp["rid"]] = stamp
        yield Run(receiver, rooms, answers, stamps)


def test_phases_are_on_the_servers_that_they_happen_on(run: Run) -> None:
    for name in ("alone", "called"):
        servers = by_server(run.of_room(name))
        assert phases(servers["prefill"], PREFILL_PHASES) == PREFILL_PHASES
        assert phases(servers["decode"], DECODE_PHASES) == DECODE_PHASES
        for server, spans in servers.items():
            root = root_of(spans)
            assert root.attributes["sgl_aspects.bootstrap_room"] == run.rooms[name], server
            below = [span for span in spans if span.name in DECODE_PHASES + PREFILL_PHASES]
            assert {span.parent_id for span in below} == {root.span_id}
            # One after the other, from the request's receipt to its end.
            for before, after in itertools.pairwise(below):
                assert before.end <= after.start + 1000
            assert root.start <= below[0].start
            assert below[-1].end <= root.end


def test_both_servers_are_in_one_trace_without_a_callers_help(run: Run) -> None:
    servers = by_server(run.of_room("alone"))
    prefill, decode = root_of(servers["prefill"]), root_of(servers["decode"])
    assert prefill.parent_id == ""
    assert decode.parent_id == prefill.span_id
    assert prefill.attributes["http.request.header.x-request-id"] == ["from-the-caller"]


def test_a_callers_trace_goes_on_on_both_servers(run: Run) -> None:
    servers = by_server(run.trace(trace_id(1)))
    assert {root_of(spans).parent_id for spans in servers.values()} == {CALLER}


@pytest.mark.parametrize("name", list(BALANCERS))
def test_one_trace_behind_each_balancer(run: Run, name: str) -> None:
    for called in (False, True):
        answer = run.answers[f"{name}, {'called' if called else 'alone'}"]
        (decode,) = [
            s
            for s in run.receiver.spans
            if s.attributes.get("gen_ai.response.id") == answer["id"]
            and s.resource["sgl_aspects.disaggregation.mode"] == "decode"
            and s.kind == 2
        ]
        servers = by_server(run.trace(decode.trace_id))
        prefill = root_of(servers["prefill"])
        assert phases(servers["prefill"], PREFILL_PHASES) == PREFILL_PHASES
        assert phases(servers["decode"], DECODE_PHASES) == DECODE_PHASES
        if called and name == "router":
            assert decode.trace_id == trace_id(10)
            assert decode.parent_id == prefill.parent_id == CALLER
        if name == "mini balancer":  # it hands no headers on
            assert decode.parent_id == prefill.span_id
        if name == "router with spans of its own":
            assert decode.parent_id == prefill.parent_id != ""


def test_phases_last_as_long_as_in_sglangs_own_times(run: Run) -> None:
    """Its stamps lie within a few lines of code of the tracer's: the same times except on a busy machine."""
    differences = []
    for name in ("alone", "called"):
        servers = by_server(run.of_room(name))
        for server, stages in {
            "prefill": {
                "bootstrap": ("prefill_bootstrap_queue_entry_time", "wait_queue_entry_time"),
                "queue": ("wait_queue_entry_time", "forward_entry_time"),
                "prefill": ("forward_entry_time", "prefill_transfer_queue_entry_time"),
                "kv_transfer": ("prefill_transfer_queue_entry_time", "prefill_kv_transfer_finish_time"),
            },
            "decode": {
                "bootstrap": ("decode_prealloc_queue_entry_time", "decode_transfer_queue_entry_time"),
                "kv_transfer": ("decode_transfer_queue_entry_time", "wait_queue_entry_time"),
                "queue": ("wait_queue_entry_time", "forward_entry_time"),
            },
        }.items():
            root = root_of(servers[server])
            stamps = run.stamps[root.attributes["gen_ai.request.id"]]
            for phase, (begin, end) in stages.items():
                (span,) = [span for span in servers[server] if span.name == phase]
                difference = (span.end - span.start) / 1e9 - (stamps[end] - stamps[begin])
                differences.append((round(difference * 1e3, 2), server, phase))
    print(sorted(differences))
    assert max(abs(difference) for difference, *_ in differences) < 20


def test_steps_have_their_scheduling(run: Run) -> None:
    for mode in ("prefill", "decode"):
        steps = [
            span
            for span in run.receiver.named("scheduler.step")
            if span.resource["sgl_aspects.disaggregation.mode"] == mode
        ]
        assert steps
        scheduled = {span.parent_id for span in run.receiver.named("schedule")}
        assert {step.span_id for step in steps} <= scheduled


def test_role_and_transfer_backend_are_on_every_span_and_metric(run: Run) -> None:
    for span in run.receiver.spans:
        assert span.resource["sgl_aspects.disaggregation.mode"] in ("prefill", "decode"), span.name
        assert span.resource["sgl_aspects.disaggregation.transfer_backend"] == "mooncake"
        assert span.resource["service.name"] == f"mini-{span.resource['sgl_aspects.disaggregation.mode']}"
        assert span.resource["host.name"]
    # Spans exported before a process has described itself lack its attributes.
    said = [each for each in run.receiver.metric_resources() if "sgl_aspects.disaggregation.mode" in each]
    assert {each["service.name"] for each in said} == {"mini-prefill", "mini-decode"}
    assert {each["sgl_aspects.disaggregation.transfer_backend"] for each in said} == {"mooncake"}


def test_gauges_fall_when_nothing_is_to_do(run: Run) -> None:
    for name in ("sgl_aspects.batch.size", "sgl_aspects.queue.running"):
        assert {point.value for point in run.receiver.points(name)} == {0}


def test_a_client_that_leaves_ends_its_request(run: Run) -> None:
    root = root_of(by_server(run.of_room("left"))["decode"])
    assert root.is_error
    (decode,) = [span for span in run.of_room("left") if span.name == "decode"]
    assert decode.attributes["sgl_aspects.finish_reason"] == "abort"


def test_a_prefill_server_that_dies_is_the_reason_on_the_decode_server(run: Run) -> None:
    spans = by_server(run.of_room("lost"))["decode"]
    assert root_of(spans).is_error
    below = [span for span in spans if span.name in DECODE_PHASES]
    assert below[-1].is_error
    assert below[-1].attributes["error.type"] in ("bootstrap_failed", "kv_transfer_failed")
