"""The server as its clients see it: OpenAI's own client, many at once, those that leave, and bad requests."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from sgl_aspects.runtime import RequestHandle, SamplingParams, StreamChunk
from sgl_aspects.runtime.frontend.request import GenerateRequest, chunks_of
from sgl_aspects.runtime.server.api_errors import ApiError
from sgl_aspects.runtime.server.calls import Call, Calls
from tests.support.answers import clear_model, clear_seed
from tests.support.http_server import LOCAL, Server, serving
from tests.support.processes import wait_until
from tests.support.threads import in_threads
from tests.support.tiny_models import make_tokenizer

TEXTS = ["the quick brown fox", "ein Käsebrot", "日本語 и", "lazy dog jumps over", "fünf", "🙂🙃"]
ROOM = 16384


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Its folder, transformers' model, and its greedy answers to TEXTS, in 12 tokens."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    prompts = [make_tokenizer().encode(text).ids for text in TEXTS]
    return folder, *clear_model(folder, prompts, 12, max_position_embeddings=ROOM)


@pytest.fixture(scope="module")
def shared_server(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--max-total-tokens", "40000", "--max-running-requests", "16", "--max-body-bytes", "200000")
    with serving(model[0], log, *flags, "--max-concurrent-requests", "80", forks=True) as server:
        yield server
        assert "Traceback" not in log.read_text()


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """Every test must leave it as it was: no request, no slot of the cache."""
    yield shared_server
    wait_until(shared_server.is_quiet)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def answers(model: Any) -> dict[str, str]:
    return dict(zip(TEXTS, map(make_tokenizer().decode, model[2])))


def completion(text: str | list[str], **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": text, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}


IGNORE = {"ignore_eos": True}

# -- OpenAI's client ---------------------------------------------------------------------------------


def test_completions_equal_those_of_transformers(client: openai.OpenAI, answers: dict[str, str]) -> None:
    for text, expected in answers.items():
        answer = client.completions.create(
            model="tiny", prompt=text, max_tokens=12, temperature=0, extra_body=IGNORE
        )
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "length")
    answer = client.completions.create(
        model="tiny", prompt=TEXTS, max_tokens=12, temperature=0, extra_body=IGNORE
    )
    assert [choice.text for choice in answer.choices] == [answers[text] for text in TEXTS]
    assert [choice.index for choice in answer.choices] == list(range(len(TEXTS)))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12 * len(TEXTS)
    assert answer.usage.prompt_tokens == sum(len(make_tokenizer().encode(text).ids) for text in TEXTS)
    ids = [make_tokenizer().encode(text).ids for text in TEXTS[:2]]
    answer = client.completions.create(
        model="tiny", prompt=ids, max_tokens=12, temperature=0, extra_body=IGNORE
    )
    assert [choice.text for choice in answer.choices] == [answers[text] for text in TEXTS[:2]]


def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI, model: Any) -> None:
    prompt = "<|start|>developer\nbe brief<|end|>\n<|start|>user\nthe quick<|end|>\n<|start|>assistant\n"
    ids = make_tokenizer().encode(prompt).ids
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "the quick"}]},
        ],
        "max_completion_tokens": 20,
        "temperature": 1.3,
        "seed": clear_seed(model[1], [ids], 20, n=2, temperature=1.3),
        "n": 2,
        "extra_body": IGNORE,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.usage is not None
    assert whole.id.startswith("chatcmpl-")
    texts, ends, usage = ["", ""], ["", ""], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert ends == ["length", "length"]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 40)


def test_log_probabilities(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "fünf Füchse"}],
        max_tokens=6,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        extra_body=IGNORE,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for entry in logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert len(entry.top_logprobs) == 2
    content = bytes(byte for entry in logprobs.content for byte in entry.bytes or ())
    assert content.decode("utf-8", "replace") == chat.choices[0].message.content
    plain = client.completions.create(
        model="tiny", prompt="a", max_tokens=5, temperature=0, logprobs=3, extra_body=IGNORE
    )
    found = plain.choices[0].logprobs
    assert found is not None
    assert len(found.tokens or ()) == len(found.text_offset or ()) == len(found.top_logprobs or ()) == 5
    assert all(len(top) == 3 for top in found.top_logprobs or ())


def test_json_that_a_schema_allows(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}, "old": {"type": "boolean"}},
        "required": ["size", "old"],
        "additionalProperties": False,
    }
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "the"}],
        response_format={"type": "json_schema", "json_schema": {"name": "dog", "schema": schema}},
    )
    answer = json.loads(chat.choices[0].message.content or "")
    assert chat.choices[0].finish_reason == "stop"
    assert answer["size"] in ("small", "large")
    assert isinstance(answer["old"], bool)


def test_models_can_be_listed_and_others_are_not_found(client: openai.OpenAI) -> None:
    assert [card.id for card in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="this server's is 'tiny'"):
        client.models.retrieve("org/other")
    with pytest.raises(openai.NotFoundError, match="model='gpt' is not served here"):
        client.completions.create(model="gpt", prompt="a")


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"temperature=2\.5: .* less than or equal to 2"
    ) as found:
        client.completions.create(model="tiny", prompt="a", temperature=2.5)
    assert found.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match=f"context length of {ROOM}"):
        client.completions.create(model="tiny", prompt="a", max_tokens=ROOM)
    with pytest.raises(openai.BadRequestError, match="json_schema cannot be used"):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}},
        )
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )


def test_64_clients_at_once(server: Server, answers: dict[str, str]) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> bool:
        text = TEXTS[number % len(TEXTS)]
        asked: dict[str, Any] = {"model": "tiny", "prompt": text, "max_tokens": 12, "temperature": 0}
        if number % 2:
            chunks = await client.completions.create(**asked, extra_body=IGNORE, stream=True)
            found = "".join([chunk.choices[0].text async for chunk in chunks])
        else:
            found = (await client.completions.create(**asked, extra_body=IGNORE)).choices[0].text
        return found == answers[text]

    async def all_of_them() -> list[bool]:
        async with openai.AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    assert all(asyncio.run(all_of_them()))


# -- clients that leave ------------------------------------------------------------------------------


def begin(server: Server, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(LOCAL, server.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_who_hangs_up_is_no_longer_computed(server: Server, stream: bool) -> None:
    aborted = server.metrics().get('sgl_aspects_requests_finished_total{reason="abort"}', 0)
    connections = [
        begin(server, completion("the quick", max_tokens=8000, stream=stream, n=2)) for _ in range(4)
    ]
    if stream:
        for connection in connections:
            response = connection.getresponse()
            assert response.readline().startswith(b"data: {")
            response.close()
    else:
        wait_until(lambda: server.metrics()["sgl_aspects_scheduler_running_requests"] == 8)
    for connection in connections:
        connection.close()
    wait_until(server.is_quiet)
    assert server.metrics()['sgl_aspects_requests_finished_total{reason="abort"}'] == aborted + 8


def test_half_a_request_and_silence_do_no_harm(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    for part in (b"", b"POST /v1/comp", head, head + b"content-length: 500\r\n\r\n{", b"\0\xff\r\n\r\n"):
        with socket.create_connection((LOCAL, server.port), timeout=60) as connection:
            connection.sendall(part)
    assert server.request("POST", "/v1/completions", completion("a"))[0] == 200


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("", "the body is not JSON"),
        ("{", "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        ('{"model": "tiny", "prompt": "\\ud800"}', "the body is not JSON"),
        ("[" * 100000, "the body is not JSON"),
        ("[]", "should be an object"),
        ("null", "^the body=null: Input should be an object"),
        ('{"model": "tiny"}', "prompt: this field is missing"),
        (completion("a", temperatur=1), "temperatur: this field is not known"),
        (completion("a", **{"x" * 5000: 1}), r"^x{100}\.\.\.: this field is not known"),
        (completion("a", temperature="1"), 'temperature="1": '),
        ('{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature=NaN: "),
        ('{"model": "tiny", "prompt": "a", "top_p": 1e999}', "top_p=Infinity: "),
        ('{"model": "tiny", "prompt": "a", "seed": ' + "9" * 5000 + "}", "the body is not JSON"),
        (completion("a", max_tokens=0), "max_tokens=0: "),
        (completion("a", max_tokens=True), "max_tokens=true: "),
        (completion("a", n=129), "n=129: "),
        (completion(["a"] * 41, n=2), "82 answers in one call: at most 80"),
        (completion("a", logprobs=21), "logprobs=21: "),
        (completion("a", stop=["a", ""]), "stop="),
        (completion("a", stop=[1]), "stop"),
        (completion("a", stop=["a"] * 65), "stop=.*at most 64 items"),
        (completion("a", logit_bias=dict.fromkeys(map(str, range(1025)), 1)), "logit_bias=.*at most 1024"),
        (completion("a", logit_bias={"one": 1}), "logit_bias: 'one' is not a token id"),
        (completion("a", logit_bias={"99999": 1}), "logit_bias: 99999 is not a token id"),
        (completion("a", logit_bias={"5": 101}), "logit_bias="),
        (completion("a", stop_token_ids=[-1]), "stop_token_ids: -1 is not a token id"),
        (completion("a", min_tokens=13), "^min_tokens=13: write at most max_tokens=12$"),
        (completion("a", stream_options={"include_usage": True}), "stream_options: only allowed with"),
        (completion("a", echo=True), "^echo=true: this is not supported$"),
        (completion(""), "the prompt is empty"),
        (completion([]), "prompt: 0 prompts"),
        (completion([[]]), "the prompt is empty"),  # type: ignore[list-item]
        (completion([1, -1]), "-1 is not a token id"),  # type: ignore[list-item]
        (completion("a " * 20000), " and max_tokens=12 do not fit the context length"),
    ],
)
def test_bad_bodies_are_named_by_their_fault(server: Server, body: Any, message: str) -> None:

    status, answer = server.request("POST", "/v1/completions", body)
    assert (status, set(answer)) == (400, {"error"})
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert re.search(message, answer["error"]["message"])
    assert len(answer["error"]["message"]) < 400


def test_conversations_that_are_none_are_refused(server: Server) -> None:
    for messages, message in (
        ([], "messages=[]"),
        ([{"role": "user"}], "content: this field is missing"),
        ([{"role": "alien", "content": "a"}], 'messages.0.role="alien"'),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages.0.content",
        ),
        ([{"role": "user", "content": None}], "messages.0.content"),
    ):
        status, answer = server.request(
            "POST", "/v1/chat/completions", {"model": "tiny", "messages": messages}
        )
        assert status == 400
        assert message in answer["error"]["message"]


def test_large_bodies_are_refused_before_they_are_read(server: Server) -> None:
    status, answer = server.request("POST", "/v1/completions", b"x" * 200001)
    assert (status, answer["error"]["message"]) == (
        413,
        "the body has 200001 bytes; at most 200000 are taken",
    )
    chunks = b"".join(b"%x\r\n%s\r\n" % (50000, b"x" * 50000) for _ in range(5))
    with socket.create_connection((LOCAL, server.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\n\r\n" + chunks
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_other_pages_methods_and_kinds_of_body_are_refused(server: Server) -> None:
    for method, path, headers, status in (
        ("GET", "/nothing", {}, 404),
        ("GET", "/v1/completions", {}, 405),
        ("DELETE", "/v1/models", {}, 405),
        ("POST", "/v1/completions", {"content-type": "text/plain"}, 415),
    ):
        found, answer = server.request(method, path, b"{}" if method == "POST" else None, headers)
        assert (found, answer["error"]["type"]) == (status, "invalid_request_error")


def test_more_answers_than_are_taken_at_once_are_refused(server: Server) -> None:
    connections = [begin(server, completion("a", max_tokens=8000, n=20)) for _ in range(4)]
    received = "sgl_aspects_requests_received_total"
    before = server.metrics()[received]
    wait_until(lambda: server.request("POST", "/v1/completions", completion("a", max_tokens=1))[0] == 429)
    status, answer = server.request("POST", "/v1/completions", completion("a"))
    assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
    assert "busy with 80 answers, of at most 80" in answer["error"]["message"]
    for connection in connections:
        connection.close()
    wait_until(server.is_quiet)
    assert server.metrics()[received] >= before
    assert server.request("POST", "/v1/completions", completion("a"))[0] == 200


def test_metrics_count_what_was_done(server: Server) -> None:
    before = server.metrics()
    with in_threads(*[lambda: server.request("POST", "/v1/completions", completion("the quick"))] * 5):
        pass
    after = server.metrics()
    for name, more in {
        "sgl_aspects_requests_received_total": 5,
        'sgl_aspects_requests_finished_total{reason="length"}': 5,
        "sgl_aspects_output_tokens_total": 60,
        'sgl_aspects_http_responses_total{path="/v1/completions",status="200"}': 5,
        'sgl_aspects_http_duration_seconds_count{path="/v1/completions"}': 5,
    }.items():
        assert after[name] - before.get(name, 0) == more


def test_an_error_of_any_kind_ends_a_call() -> None:
    request = GenerateRequest([5], SamplingParams(), "r", stream=True, headers={}, group="")
    manager: Any = SimpleNamespace(model="tiny", tokenizer=None)
    going, failing = RequestHandle(request, manager), RequestHandle(request, manager)
    failing.put_chunk(StreamChunk("r", "a", [1]))
    failing.error = KeyError("unthought of")  # with an unforeseen error
    failing.put_chunk(None)
    read = []

    async def chunks() -> None:
        async for index, chunk in Call("cmpl-", 2, groups=[[going, failing]]).chunks():
            read.append((index, chunk.text))

    with pytest.raises(KeyError, match="unthought of"):
        asyncio.run(asyncio.wait_for(chunks(), 10))
    assert read == [(1, "a")]


def test_what_comes_for_a_reader_that_is_gone_does_no_harm() -> None:
    """If its event loop is closed, the thread that receives goes on with the other requests."""
    request = GenerateRequest([5], SamplingParams(), "r", stream=True, headers={}, group="")
    handle = RequestHandle(request, SimpleNamespace(model="tiny", tokenizer=None))  # type: ignore[arg-type]
    handle.put_chunk(StreamChunk("r", "a", [1]))

    async def first() -> str:
        async for _, chunk in chunks_of([handle]):
            return chunk.text
        return ""

    assert asyncio.run(first()) == "a"
    handle.put_chunk(None)


def test_a_call_that_is_being_sent_when_all_are_given_up_is_refused() -> None:
    sending, go_on, ended = threading.Event(), threading.Event(), []

    class Engine:
        failure = None

        def submit_group(self, prompts: Any, params: Any, **more: Any) -> Any:
            sending.set()
            assert go_on.wait(60)
            return [[SimpleNamespace(abort=lambda: ended.append(prompts))]]

    async def start() -> None:
        calls = Calls(Engine(), 8)  # type: ignore[arg-type]
        request: Any = SimpleNamespace(headers={})
        starting = asyncio.ensure_future(calls.start(request, "cmpl-", ["a"], SamplingParams(), stream=False))
        assert await asyncio.to_thread(sending.wait, 60)
        calls.fail("the server is stopping")
        go_on.set()
        try:
            await starting
        finally:
            assert calls.count == 0

    with pytest.raises(ApiError, match="the server is stopping"):
        asyncio.run(start())
    assert ended == [["a"]]
