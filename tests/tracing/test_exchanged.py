"""The HTTP server's side of a request, whatever engine answers it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sgl_aspects.engines.sglang.roles import SGLANG
from sgl_aspects.engines.vllm.roles import VLLM
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.lifecycle.calls import Call
from sgl_aspects.tracing.lifecycle.exchanges import Exchange, current_exchange, operation_of
from sgl_aspects.tracing.observers.exchanged import ExchangeObserver
from sgl_aspects.tracing.options import DEFAULTS
from tests.support.memory_recorder import Memory


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/messages", "chat"),
        ("/v1/responses", "chat"),
        ("/api/chat", "chat"),
        ("/v1/completions", "text_completion"),
        ("/generate", "text_completion"),
        ("/v1/audio/transcriptions", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/score", "rerank"),
        ("/v2/rerank", "rerank"),
        ("/generative_scoring", "rerank"),
        ("/v1/decisions", "rerank"),
        ("/v1/systemone", "rerank"),
        ("/v1/chat/completions/batch", "chat"),
        ("/encode", "embeddings"),
        ("/health", None),
        ("/v1/models", None),
        ("/tokenize", None),
    ],
)
def test_a_path_determines_the_operation(path: str, operation: str | None) -> None:
    assert operation_of(path) == operation


@contextmanager
def exchanged(is_complete: bool = False, **scope: str) -> Iterator[tuple[Exchange, Any, Any, Any]]:
    """A request whose response is sent in the block: what is known of it, its cycle, and the observers of
    parts of the response and of waits for the caller.
    """
    exchange, respond, await_caller = ExchangeObserver([], DEFAULTS).observations()
    cycle = SimpleNamespace(scope=scope, transport=None, response_complete=is_complete, disconnected=False)
    token = exchange.enter((cycle,), {})
    found = current_exchange.get()
    assert found is not None
    yield found, cycle, respond, await_caller
    exchange.exit(token, None, None)


CHAT = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[]}\n\n'
CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_2","x":{}}}\n\n'
IN_PROGRESS = b'event: response.in_progress\ndata: {"type":"response.in_progress","response":{}}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n'
STARTED = b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_3","role":"x"}}\n\n'


@pytest.mark.parametrize(
    ("bodies", "first", "response_id"),
    [
        ([CHAT, CHAT], 0, "chatcmpl-1"),
        ([CREATED, IN_PROGRESS, DELTA, DELTA], 2, "resp_2"),
        ([CREATED + IN_PROGRESS, DELTA], 1, "resp_2"),
        ([CREATED + DELTA, DELTA], 0, "resp_2"),
        ([STARTED, b"event: content_block_delta\ndata: {}\n\n"], 1, "msg_3"),
        ([b'{"id":"msg_4","type":"message","content":[]}'], 0, "msg_4"),
        ([b"plain"], 0, ""),
    ],
)
def test_an_answer_begins_with_its_first_part(bodies: list[bytes], first: int, response_id: str) -> None:
    """Events that come before any part of an answer do not count, but have its id."""
    begun = []
    with exchanged(True, path="/v1/responses") as (found, cycle, respond, _):
        for body in bodies:
            respond.enter((cycle, {"type": "http.response.body", "body": body}), {})
            begun.append(bool(found.first_ns))
    assert begun.index(True) == first
    assert found.response_id == response_id


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'data: {"error":{"message":"too long","type":"invalid_request_error","code":400}}\n\n', 400),
        (b'data: {"error": {"message": "broken", "code": 500}}\n\n', 200),
        (b'data: {"text":"{\\"error\\":{\\"code\\":400}}"}\n\n', 200),
    ],
)
def test_a_refusal_in_a_streamed_answer_has_a_status(body: bytes, status: int) -> None:
    with exchanged() as (found, cycle, respond, _):
        respond.enter((cycle, {"type": "http.response.start", "status": 200}), {})
        respond.enter((cycle, {"type": "http.response.body", "body": body, "more_body": True}), {})
        assert found.status == status


def test_a_response_to_a_client_that_is_gone_has_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy server reads its request later, and answers it as its caller's mistake, which nobody gets."""
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", ModuleType("async_llm"))
    recorder = Memory()
    exchange, respond, _ = ExchangeObserver([Trackers.of(VLLM, recorder, DEFAULTS)], DEFAULTS).observations()
    scope = {"path": "/v1/completions"}
    cycle = SimpleNamespace(scope=scope, transport=None, response_complete=False, disconnected=True)
    token = exchange.enter((cycle,), {})
    found = current_exchange.get()
    assert found is not None
    respond.enter((cycle, {"type": "http.response.start", "status": 400}), {})
    exchange.exit(token, None, None)
    assert (found.status, found.is_whole) == (0, False)
    (root,) = recorder.ended
    assert (root.error, root.values[-1]) == ("abort", None)


def test_what_runs_after_a_response_is_not_of_its_request() -> None:
    """SGLang waits for two seconds after each streamed answer, in case that its client was gone."""
    ended: list[bool] = []
    with exchanged() as (found, cycle, respond, _):
        found.at_end.append(lambda: ended.append(found.is_whole))
        for body, more in ((b"data: {}", True), (b"", False)):
            message = {"type": "http.response.body", "body": body, "more_body": more}
            part = respond.enter((cycle, message), {})
            cycle.response_complete = not more
            respond.exit(part, None, None)
            assert bool(ended) is not more
    assert ended == [True]


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_request_whose_caller_is_gone_does_not_wait_for_what_its_server_does_later(is_gone: bool) -> None:
    """SGLang's two seconds, before any part of the answer; a caller that is there gets a response yet."""
    recorder = Memory()
    calls = Trackers.of(SGLANG, recorder, DEFAULTS).calls
    call = Call(recorder.new_id(), "a", 1, TraceContext(5, 7, True, "", False), "text_completion mini")
    with exchanged() as (call.exchange, cycle, _, _):
        cycle.disconnected = is_gone
        calls.leave(call, "CancelledError", False)
        assert bool(recorder.ended) is is_gone
    (root,) = recorder.ended
    assert root.error == "CancelledError"


@pytest.mark.parametrize("leaves", ["", "during the answer", "after it"])
def test_a_whole_answer_that_its_caller_does_not_get_is_an_abort(leaves: str) -> None:
    """SGLang asks every four seconds whether the caller of an answer in one piece is there."""
    recorder = Memory()
    calls = Trackers.of(SGLANG, recorder, DEFAULTS).calls
    call = Call(recorder.new_id(), "a", 1, TraceContext(5, 7, True, "", False), "text_completion mini")
    with exchanged(not leaves) as (call.exchange, cycle, _, _):
        cycle.disconnected = leaves == "during the answer"
        calls.end(call, "length")
        cycle.disconnected = bool(leaves)
    (root,) = recorder.ended
    assert root.error == ("abort" if leaves else "")
    assert dict(zip(root.type.attributes, root.values))["gen_ai.response.finish_reasons"] == ["length"]


@pytest.mark.parametrize("is_gone", [True, False])
def test_an_error_after_its_caller_hung_up_is_an_abort(is_gone: bool) -> None:
    """SGLang ends such a request by a ValueError, as it refuses others; `usage` counted it as failed."""
    recorder = Memory()
    calls = Trackers.of(SGLANG, recorder, DEFAULTS).calls
    call = Call(recorder.new_id(), "a", 1, TraceContext(5, 7, True, "", False), "text_completion mini")
    with exchanged(not is_gone) as (call.exchange, cycle, _, _):
        cycle.disconnected = is_gone
        calls.leave(call, "ValueError", False)
    (root,) = recorder.ended
    assert root.error == ("abort" if is_gone else "ValueError")


def test_times_in_which_the_caller_did_not_read_add_up() -> None:
    totals = []
    with exchanged(True) as (found, _, _, await_caller):
        assert not found.unread
        for _ in range(2):
            await_caller.exit(await_caller.enter((), {}), None, None)
            totals.append(found.unread[2])
    first_ns, last_ns, total_ns = found.unread
    assert 0 < totals[0] < total_ns < last_ns - first_ns
