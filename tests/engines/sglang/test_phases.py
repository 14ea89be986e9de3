"""Real SGLang with little memory, small chunks and a pause: what its requests wait for and are fed is counted
once. The receiver checks the rule of phases on every request (tests/support/phases.py).
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.support.callers import Requests, by_trace, parent, trace_id
from tests.support.otlp_receiver import Receiver
from tests.support.phases import engine_receiver, run_prefix
from tests.support.processes import free_port
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import Server, serve

grpc = pytest.importorskip("grpc")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

CHUNK, MEMORY = 32, 900
#: Numbers of the requests: a long prompt alone; beside answers; answers that are preempted; two of different
#: priority; those that a pause interrupts.
LONG, BESIDE, MANY, DISPLACED, PAUSED = 1, range(10, 26), range(30, 35), (40, 41), range(50, 53)
#: Answers of other interfaces, and requests that are refused or aborted.
RESPONSE, MESSAGE, UNGRAMMATICAL, BY_GRPC, TOO_LONG, ABORTED = range(60, 66)


@dataclass
class Run(Requests):
    #: The ids of the answers, and when the text of a streamed one began, in seconds.
    ids: dict[int, str]
    first_text: float


def generate(server: Server, number: int, words: int, tokens: int, **more: Any) -> None:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    text = f"{number} " + "fox " * words
    server.post("/generate", {"text": text, "sampling_params": sampling, **more}, parent(number))


def stream_response(server: Server, number: int) -> tuple[str, float]:
    """Return the id of a streamed answer, and after how many seconds its text began."""
    body = {"model": "mini", "input": "tell me", "max_output_tokens": 30, "stream": True, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    headers = {"content-type": "application/json", **parent(number)}
    begun, found, first = time.monotonic(), "", 0.0
    connection.request("POST", "/v1/responses", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[len(b"data: ") :])
            found = found or event["response"]["id"]
            if event["type"].endswith(".delta"):
                first = first or time.monotonic() - begun
    connection.close()
    return found, first


def chat_by_grpc(port: int, number: int, text: str = "tell me") -> dict[str, Any]:
    """Return the answer to a chat over SGLang's own gRPC server, whose messages wrap OpenAI's."""

    def field(tag: int, content: bytes) -> bytes:
        return bytes([tag << 3 | 2, len(content) & 127 | 128, len(content) >> 7]) + content

    body = {"model": "mini", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    (header,) = parent(number).items()
    message = field(1, json.dumps(body).encode())
    message += field(2, b"".join(field(1 + index, part.encode()) for index, part in enumerate(header)))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = channel.unary_stream("/sglang.runtime.v1.SglangService/ChatComplete")
        answer = b"".join(method(message, timeout=120))
    found: dict[str, Any] = json.loads(answer[answer.index(b"{") : answer.rindex(b"}") + 1])
    return found


def drive(server: Server, receiver: Receiver) -> None:
    generate(server, LONG, 100, 4)
    with ThreadPoolExecutor(16) as pool:
        for number in BESIDE:
            pool.submit(generate, server, number, 10 + number, 20)
            time.sleep(0.01)  # while others decode
    with ThreadPoolExecutor(16) as pool:
        for number in MANY:
            pool.submit(generate, server, number, 10, 260)
    with ThreadPoolExecutor(16) as pool:
        pool.submit(generate, server, DISPLACED[0], 20, 700, priority=1)
        receiver.wait_for(lambda spans: bool(spans))
        time.sleep(0.3)
        pool.submit(generate, server, DISPLACED[1], 100, 300, priority=9)
    with ThreadPoolExecutor(16) as pool:
        for number in PAUSED:
            pool.submit(generate, server, number, 10, 200)
        time.sleep(0.5)
        server.post("/pause_generation", {"mode": "retract"})
        time.sleep(1)
        server.post("/continue_generation", {})
    with ThreadPoolExecutor(1) as pool:
        pool.submit(generate, server, ABORTED, 10, 700)
        time.sleep(0.5)
        server.post("/pause_generation", {"mode": "abort"})
        server.post("/continue_generation", {})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    with engine_receiver() as receiver:
        more = ["--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk"]
        more += ["--max-total-tokens", str(MEMORY), "--grpc-port", str(grpc_port := free_port())]
        more += ["--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "2"]
        # SGLang preempts now and then as if there were no memory left.
        forced = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "50"}
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "100", **forced}
        with serve(
            make_mini(folder / "mini"),
            folder / "log",
            prefix=run_prefix(receiver, level=2),
            more=more,
            environment=environment,
            without=("--max-total-tokens",),
        ) as server:
            drive(server, receiver)
            response_id, first_text = stream_response(server, RESPONSE)
            whole = {"model": "mini", "max_tokens": 4, "messages": [{"role": "user", "content": "tell me"}]}
            message_id = server.post("/v1/messages", whole, parent(MESSAGE))["id"]
            bad = {"text": "x", "sampling_params": {"max_new_tokens": 4, "ebnf": "root ::= ((("}}
            server.post("/generate", bad, parent(UNGRAMMATICAL), status=400)
            by_grpc = chat_by_grpc(grpc_port, BY_GRPC)
            assert chat_by_grpc(grpc_port, TOO_LONG, "fox " * 2000)["code"] == 400
        receiver.wait_for(
            lambda spans: {trace_id(UNGRAMMATICAL), trace_id(TOO_LONG)} <= {span.trace_id for span in spans}
        )
        ids = {RESPONSE: response_id, MESSAGE: message_id, BY_GRPC: by_grpc["id"]}
        yield Run(receiver, by_trace(receiver.spans), ids, first_text)


def test_chunks_of_a_prompt_follow_each_other(run: Run) -> None:
    chunks, root = run.spans(LONG, "prefill"), run.root(LONG)
    assert len(chunks) > 2
    fed = sum(chunk.attributes["sgl_aspects.prefill.tokens"] for chunk in chunks)
    assert fed == root.attributes["gen_ai.usage.input_tokens"]
    lasted = root.attributes["gen_ai.latency.time_in_model_prefill"]
    assert lasted <= root.attributes["gen_ai.latency.time_to_first_token"]


def test_a_request_that_decodes_in_a_batch_of_prompts_is_not_fed_again(run: Run) -> None:
    for number in BESIDE:
        first = run.spans(number, "decode")[0].start
        prefills = [chunk for chunk in run.spans(number, "prefill") if chunk.start < first]
        fed = sum(chunk.attributes["sgl_aspects.prefill.tokens"] for chunk in prefills)
        cached = run.root(number).attributes.get("gen_ai.usage.cache_read.input_tokens", 0)
        assert fed + cached == run.root(number).attributes["gen_ai.usage.input_tokens"]


@pytest.mark.parametrize("numbers", [MANY, PAUSED], ids=["memory", "pause"])
def test_an_interrupted_request_decodes_each_token_once(run: Run, numbers: tuple[int, ...]) -> None:
    interrupted = []
    for number in numbers:
        decodes = run.spans(number, "decode")
        tokens = [decode.attributes["gen_ai.usage.output_tokens"] for decode in decodes]
        assert sum(tokens) == run.root(number).attributes["gen_ai.usage.output_tokens"]
        assert len(run.spans(number, "queue")) == len(decodes)
        interrupted += [
            decode for decode in decodes if decode.attributes["sgl_aspects.finish_reason"] == "retracted"
        ]
    assert interrupted


def test_a_priority_is_on_its_request(run: Run) -> None:
    assert [run.root(number).attributes["sgl_aspects.priority"] for number in DISPLACED] == [1, 9]


def test_a_paused_request_waits_in_the_queue(run: Run) -> None:
    for number in PAUSED:
        waits = [span.end - span.start for span in run.spans(number, "queue")]
        assert max(waits) > 0.9e9


@pytest.mark.parametrize("number", [RESPONSE, MESSAGE, BY_GRPC])
def test_an_answers_id_is_the_one_that_its_client_got(run: Run, number: int) -> None:
    assert run.root(number).attributes["gen_ai.response.id"] == run.ids[number]


def test_a_chat_over_grpc_is_a_request_of_its_caller(run: Run) -> None:
    phases = ["queue", "prefill", "decode"]
    assert run.root(BY_GRPC).name == "chat mini"
    assert [span.name for span in run.of(BY_GRPC) if span.name in phases] == phases
    assert len(run.spans(BY_GRPC, "chat_template")) == 1


def test_a_streamed_response_begins_with_its_text(run: Run) -> None:
    recorded = run.root(RESPONSE).attributes["gen_ai.latency.time_to_first_token"]
    assert recorded <= run.first_text  # as its client saw it, from before it was sent
    assert recorded >= (run.spans(RESPONSE, "decode")[0].start - run.root(RESPONSE).start) / 1e9


def test_a_grammar_that_is_none_is_its_callers_mistake(run: Run) -> None:
    root = run.root(UNGRAMMATICAL)
    assert root.attributes["error.type"] == "BadRequestError"
    assert root.attributes["http.response.status_code"] == 400
    assert "gen_ai.usage.input_tokens" not in root.attributes  # in SGLang's message of its end: 1
    assert not root.is_error
    before = {root.name, "tokenize", "grammar", "queue"}
    assert {span.name for span in run.of(UNGRAMMATICAL)} <= {*before, "detokenize"}


def test_a_refusal_over_grpc_is_its_callers_mistake(run: Run) -> None:
    root = run.root(TOO_LONG)
    assert root.attributes["error.type"] == "ValueError"
    assert root.attributes["http.response.status_code"] == 400
    assert not root.is_error


def test_a_pause_by_aborts_is_linked_to_the_requests_that_it_ends(run: Run) -> None:
    root = run.root(ABORTED)
    pauses = [span for span in run.receiver.named("pause") if (root.trace_id, root.span_id) in span.links]
    assert len(pauses) == 1
    assert pauses[0].start < root.end <= pauses[0].end
    assert root.attributes["error.type"] == "abort"
