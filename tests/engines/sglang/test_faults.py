"""Real SGLang with what callers should not send, clients that go, and a scheduler that is killed.

Each request is sent to a server with everything attached, and of one with nothing attached: what clients get
is the same, and each trace ends with the right status.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import finished

pytest.importorskip("sglang")

from tests.support.callers import CALLER, by_trace, one, parent, trace_id
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import engine_receiver
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import Server, serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

CHILDREN = ["tokenize", "queue", "prefill", "decode", "detokenize"]
NAMES = "text_completion mini"


def generate(headers: dict[str, str], *, tokens: int = 4, **body: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, **body.pop("sampling", {})}
    return {
        "path": "/generate",
        "headers": headers,
        "body": {"text": "one", "sampling_params": sampling, **body},
    }


MALFORMED = {
    "odd-version": f"ff-{trace_id(900)}-{CALLER}-01",
    "no-trace": f"00-{'0' * 32}-{CALLER}-01",
    "no-parent": f"00-{trace_id(901)}-{'0' * 16}-01",
    "too-long": f"00-{trace_id(902)}-{CALLER}-01-more",
    "upper": f"00-{'ABCDEF01' * 4}-{CALLER}-01",
    "words": "not a traceparent",
    "latin": "00-\u00e9\u00e8-\u00e0",
    "huge": "00-" + "1" * 16000 + "-01",
    "empty": "",
}
HUGE_STATE = ",".join(f"vendor{number}={'x' * 200}" for number in range(60))
ODD_RIDS = [
    "ünïcode-请求-🙂",
    "with spaces\nand\tlines",
    "x" * 3000,
    "'; DROP TABLE spans; --",
    "0",
    "\u0000nul",
]

ALONE: dict[str, dict[str, Any]] = {
    **{
        f"malformed {name}": generate({"traceparent": value}, rid=f"malformed-{name}")
        for name, value in MALFORMED.items()
    },
    "huge tracestate": generate(parent(0, tracestate=HUGE_STATE)),
    "good tracestate": generate(parent(1, tracestate="vendor=value,other=1")),
    "odd tracestate": generate(parent(2, tracestate="=,;;\u00e9,===")),
    **{f"rid {number}": generate(parent(10 + number), rid=rid) for number, rid in enumerate(ODD_RIDS)},
    "a number for a rid": generate(parent(20), rid=7),
    "a rid again": generate(parent(21), rid="again"),
    "a rid once more": generate(parent(22), rid="again"),
    "a rid twice in a batch": generate(parent(23), text=["one", "two"], rid=["same", "same"]),
    "a batch of samples, streamed": generate(parent(24), text=["one", "two"], sampling={"n": 2}, stream=True),
    "samples, streamed": generate(parent(25), sampling={"n": 3}, stream=True),
    "no body": {"path": "/generate", "headers": parent(26), "body": {}},
    "a bad parameter": generate(parent(27), sampling={"temperature": -5}),
    "no tokens": generate(parent(28), tokens=0),
    "streamed": generate(parent(29), stream=True),
    "too long a prompt": generate(parent(30), text="x " * 2000, stream=True),
    "a prompt of ids": {
        "path": "/generate",
        "headers": parent(31),
        "body": {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3, "temperature": 0}},
    },
    "a path that does not exist": {"path": "/nowhere", "headers": parent(33), "body": {}},
}
# At once: the second request of this name comes while the first one is being answered.
TWINS = [generate(parent(40 + number), tokens=200, rid="twin", stream=True) for number in range(2)]
# What differs from run to run in an answer.
VARYING = re.compile(
    r'"(id|e2e_latency|created|queue_time|[a-z_]*(time|latency|ts|throughput)[a-z_]*)": ?("[^"]*"|[0-9.e+-]+)'
)


def ask_everything(server: Server) -> dict[str, Any]:
    """Each request with its status and text, and whether the server still answers after all of them."""
    results: dict[str, Any] = {}
    for name, request in ALONE.items():
        (result,) = server.exchange([request])
        results[name] = (result["status"], told(result["text"]))
    twins = server.exchange(TWINS)
    results["twins"] = sorted((result["status"], reason_of(result["text"])) for result in twins)
    server.leave_generation("to be left", parent(50))
    server.abort("/generate", parent(51), "to be aborted")
    results["in the end"] = server.exchange([generate(parent(52))])[0]["status"]
    return results


def told(text: str) -> Any:
    """The responses to a client, without parts that differ between runs; of a stream, each whole answer."""
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if not chunks:
        return VARYING.sub("", text)
    return {chunk.get("index", 0): chunk if "error" in chunk else chunk["text"] for chunk in chunks}


def reason_of(text: str) -> str:
    """Why a streamed answer ended; "" if it has no reason."""
    found: list[str] = re.findall(r'"finish_reason": ?\{"type": ?"(\w+)"', text)
    return found[-1] if found else ""


@dataclass
class Run:
    attached: dict[str, Any]
    receiver: Receiver
    traces: dict[str, list[Span]]
    log: str
    killed: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mini(tmp_path_factory.mktemp("models") / "mini")


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    with engine_receiver() as receiver:
        launcher = [sys.executable, "-m", "sgl_aspects", "run", "--level", "4"]
        launcher += ["--endpoint", receiver.endpoint, "--"]
        with serve(model, folder / "log", prefix=launcher) as server:
            attached = ask_everything(server)
            log = server.log.read_text()
            killed = kill_scheduler_while_it_works(server)
        receiver.wait_for(
            lambda spans: any(span.trace_id == trace_id(60) and span.name == NAMES for span in spans)
        )
        receiver.wait_for(lambda spans: any(span.attributes.get("sgl_aspects.unfinished") for span in spans))
        yield Run(attached, receiver, by_trace(receiver.spans), log, killed)


def kill_scheduler_while_it_works(server: Server) -> str:
    """kill -9 after the first part of a streamed answer; returns how SGLang itself ended."""
    import http.client

    body = generate({}, tokens=900, stream=True, sampling={"ignore_eos": True})["body"]
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(
        "POST", "/generate", json.dumps(body), {"content-type": "application/json", **parent(60)}
    )
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ")
    listed = finished("pgrep", "-s", str(server.process.pid), "-f", "sglang::schedul")
    for process in listed.stdout.split():
        os.kill(int(process), signal.SIGKILL)
    assert listed.stdout
    response.close()
    connection.close()
    deadline = time.monotonic() + 60
    while server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return "ended" if server.process.poll() is not None else "still there"


def root_of(run: Run, number: int) -> Span:
    (root,) = [span for span in run.traces[trace_id(number)] if span.parent_id == CALLER]
    return root


def test_clients_get_what_they_get_with_nothing_attached(run: Run, model: Path, tmp_path: Path) -> None:
    with serve(model, tmp_path / "log") as server:
        alone = ask_everything(server)
    # Whether SGLang aborts the first of two with one id, when it has refused the second, is a race.
    assert [status for status, _ in alone.pop("twins")] == [status for status, _ in run.attached["twins"]]
    different = {
        name: (alone[name], run.attached[name]) for name in alone if alone[name] != run.attached[name]
    }
    assert different == {}
    assert run.attached["in the end"] == 200
    print({name: found[0] if isinstance(found, tuple) else found for name, found in alone.items()})


def test_nothing_of_ours_complained(run: Run) -> None:
    assert [
        line for line in run.log.splitlines() if "sgl_aspects" in line and "SGL_ASPECTS_" not in line
    ] == []


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_traceparent_is_ignored(run: Run, name: str) -> None:
    (root,) = [
        span for span in run.receiver.spans if span.attributes.get("gen_ai.request.id") == f"malformed-{name}"
    ]
    assert root.parent_id == ""
    assert sorted(span.name for span in run.traces[root.trace_id]) == sorted([*CHILDREN, NAMES])


def test_a_tracestate_goes_along_where_it_can(run: Run) -> None:
    assert root_of(run, 1).trace_state == "vendor=value,other=1"
    for number in (0, 2):
        assert sorted(span.name for span in run.traces[trace_id(number)]) == sorted([*CHILDREN, NAMES])


@pytest.mark.parametrize("number", range(len(ODD_RIDS)))
def test_an_odd_request_id_is_joined_like_any_other(run: Run, number: int) -> None:
    spans = run.traces[trace_id(10 + number)]
    assert sorted(span.name for span in spans) == sorted([*CHILDREN, NAMES])
    told = root_of(run, 10 + number).attributes["gen_ai.request.id"]
    assert ODD_RIDS[number].replace("\u0000", "").startswith(told.replace("\u0000", "")[:100])


def test_a_request_id_that_is_used_again_has_two_traces(run: Run) -> None:
    for number in (21, 22):
        spans = run.traces[trace_id(number)]
        assert sorted(span.name for span in spans) == sorted([*CHILDREN, NAMES])
        assert not any(span.is_error for span in spans)


def test_of_two_with_one_id_each_ends_as_its_client_saw(run: Run) -> None:
    print(run.attached["twins"])
    roots = [root_of(run, number) for number in (40, 41)]
    refused = [root for root in roots if root.attributes.get("error.type") == "ValueError"]
    assert len(refused) == 1
    assert [span.name for span in run.traces[refused[0].trace_id]] == [NAMES]
    (first,) = [root for root in roots if root not in refused]
    reasons = {reason for _, reason in run.attached["twins"]} - {""}
    assert set(first.attributes["gen_ai.response.finish_reasons"]) == reasons
    assert first.is_error == ("abort" in reasons)
    assert sorted(span.name for span in run.traces[first.trace_id]) == sorted([*CHILDREN, NAMES])


def test_streamed_samples_are_children_of_one_request(run: Run) -> None:
    for number, prompts, samples in ((24, 2, 2), (25, 1, 3)):
        spans = run.traces[trace_id(number)]
        root = root_of(run, number)
        answers = [span for span in spans if span.name == NAMES and span is not root]
        assert {span.parent_id for span in answers} == {root.span_id}
        assert len(answers) == prompts * (samples + 1)
        assert Counter(span.name for span in spans)["decode"] == prompts * samples
        assert not any(span.is_error for span in spans)
        assert root.attributes["gen_ai.usage.output_tokens"] == prompts * samples * 4


def test_what_sglang_refuses_ends_with_an_error_or_leaves_no_span(run: Run) -> None:
    for number, request in (
        (20, "a number for a rid"),
        (23, "a rid twice in a batch"),
        (27, "a bad parameter"),
        (30, "too long a prompt"),
    ):
        status = run.attached[request][0]
        for span in run.traces.get(trace_id(number), []):
            if span.parent_id == CALLER and (status != 200 or "error" in str(run.attached[request][1])):
                assert span.attributes["error.type"], request
                refused = 400 <= status < 500 or request == "too long a prompt"  # in its stream
                assert span.is_error != refused, request


def test_clients_that_go_and_aborts_end_their_traces(run: Run) -> None:
    assert root_of(run, 50).is_error
    assert one(run.traces[trace_id(50)], "decode").attributes["sgl_aspects.finish_reason"] == "abort"
    assert root_of(run, 51).attributes["error.type"] == "abort"


def test_a_killed_scheduler_leaves_its_finished_spans_and_marks_the_others(run: Run) -> None:
    assert run.killed == "ended"
    spans = run.traces[trace_id(60)]
    names = Counter(span.name for span in spans)
    assert names[NAMES] == names["tokenize"] == names["queue"] == names["prefill"] == 1
    root = root_of(run, 60)
    assert root.is_error or root.attributes.get("sgl_aspects.unfinished")
    decode = one(spans, "decode")
    assert decode.attributes.get("sgl_aspects.unfinished")


def test_no_span_is_an_orphan_and_none_is_twice(run: Run) -> None:
    ids = Counter(span.span_id for span in run.receiver.spans)
    assert [span_id for span_id, times in ids.items() if times > 1] == []
    for spans in run.traces.values():
        known = {span.span_id for span in spans} | {"", CALLER}
        orphans = [(span.name, span.parent_id) for span in spans if span.parent_id not in known]
        assert orphans == [], sorted({span.name for span in spans})
