"""Requests that are served by generators, several of them answered in one call."""

from __future__ import annotations

import asyncio
import sys
from contextvars import copy_context
from http import HTTPStatus
from time import monotonic_ns
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from sgl_aspects.engines.sglang.roles import SGLANG
from sgl_aspects.engines.vllm.roles import VLLM
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.lifecycle.calls import Call
from sgl_aspects.tracing.lifecycle.exchanges import Exchange, current_exchange
from sgl_aspects.tracing.observers.exchanged import RpcObserver
from sgl_aspects.tracing.observers.serving import ServingObserver
from sgl_aspects.tracing.options import DEFAULTS
from sgl_aspects.tracing.records import RequestBegin
from sgl_aspects.tracing.schema import DETOKENIZE, REQUEST
from tests.support.callers import parent, trace_id
from tests.support.memory_recorder import Memory
from tests.support.stepping import Loop


def test_callers_that_go_between_two_answers_of_a_batch() -> None:
    """SGLang wakes sixteen callers at a time: some have their answers while its call goes on."""
    recorder = Memory()
    trackers = Trackers.of(SGLANG, recorder, DEFAULTS)
    found: dict[str, Any] = {each.role: each for each in ServingObserver(trackers).observations()}
    woken = {rid: asyncio.Event() for rid in ("first", "second")}
    left: list[str] = []
    manager = object()

    async def serve(rid: str) -> None:
        sampling = {"max_new_tokens": 4}
        request = SimpleNamespace(
            rid=rid,
            is_single=True,
            stream=False,
            sampling_params=sampling,
            external_trace_header=None,
            received_time=0,
            parallel_sample_num=1,
            text="a prompt",
        )
        token = found["serve_request"].enter((manager, request, None), {})
        began = found["receive_request"].enter((manager, request, None), {})
        found["receive_request"].exit(began, None, None)
        await woken[rid].wait()
        left.append(rid)
        found["serve_request"].exit(token, None, GeneratorExit())

    async def answer() -> None:
        reason = {"type": "length"}
        outputs = SimpleNamespace(
            rids=[*woken],
            finished_reasons=[reason] * 2,
            prompt_tokens=[2, 2],
            completion_tokens=[4, 4],
            cached_tokens=[0, 0],
            output_strs=["", ""],
        )
        token = found["receive_outputs"].enter((manager, outputs), {})
        for rid, event in woken.items():
            event.set()
            while rid not in left:
                await asyncio.sleep(0)
        found["receive_outputs"].exit(token, None, None)

    async def run() -> None:
        served = [asyncio.create_task(serve(rid)) for rid in woken]
        await asyncio.sleep(0)
        await answer()
        await asyncio.gather(*served)

    asyncio.run(run())
    roots = [span for span in recorder.ended if span.span_id == span.root_id]
    assert [span.error for span in roots] == ["", ""]


@pytest.mark.parametrize(("templated", "name"), [(False, "text_completion mini"), (True, "chat mini")])
def test_a_request_that_is_refused_as_it_is_received_ends_with_its_response(
    templated: bool, name: str
) -> None:
    """Of a path that does not say so, what has used a chat template is a chat."""
    recorder = Memory()
    observer = ServingObserver(Trackers.of(SGLANG, recorder, DEFAULTS))
    found: dict[str, Any] = {each.role: each for each in observer.observations()}
    exchange = Exchange({"path": "/invocations"}, monotonic_ns())
    if templated:
        exchange.templated.append((1, 2, (), ""))
    before = current_exchange.set(exchange)
    request = SimpleNamespace(
        rid="taken", is_single=True, stream=False, sampling_params={}, received_time=0, parallel_sample_num=1
    )
    call = SimpleNamespace(served_model_name="mini"), request
    token = found["serve_request"].enter((*call, None), {})
    found["receive_request"].exit(found["receive_request"].enter(call, {}), None, ValueError())
    found["serve_request"].exit(token, None, ValueError())
    current_exchange.reset(before)
    exchange.status = 400  # what follows it
    for end in exchange.at_end:
        end()
    (root,) = [span for span in recorder.ended if span.type is REQUEST]
    assert root.error == "ValueError"
    assert root.values[-1] == 400
    assert [record.name for record in recorder.events if isinstance(record, RequestBegin)] == [name]


@pytest.mark.parametrize(
    ("roles", "path"),
    [
        (["render_template"], "/api/chat"),
        (["render_messages", "render_template", "render_template"], "/v1/responses"),
        (["apply_template", "render_template"], "/v1/messages"),
    ],
)
def test_a_template_is_applied_once_on_each_path(roles: list[str], path: str) -> None:
    """The first role's function calls the others."""
    trackers = Trackers.of(SGLANG, Memory(), DEFAULTS)
    found = {each.role: each for each in ServingObserver(trackers).observations()}
    exchange = Exchange({"path": path}, monotonic_ns())
    before = current_exchange.set(exchange)
    outer, *inner = roles
    token = found[outer].enter((None, None, None), {})
    for role in inner:
        found[role].exit(found[role].enter((None, None), {}), None, None)
    found[outer].exit(token, None, None)
    current_exchange.reset(before)
    assert len(exchange.templated) == 1
    assert exchange.templated[0][0] == token[-1]


class UnavailableError(Exception):
    status_code = 503


class HTTPRequest:
    headers: ClassVar[dict[str, str]] = {}


GONE = "Request is disconnected from the client side (type 1). Abort request obj.rid='r'"


@pytest.mark.parametrize(
    ("error", "http", "status"),
    [
        (ValueError("The input is too long."), HTTPRequest(), 400),
        (ValueError(GONE), HTTPRequest(), None),
        (UnavailableError(), HTTPRequest(), 503),
        (RuntimeError(), HTTPRequest(), None),
        (ValueError("The input is too long."), None, None),  # of the program itself
    ],
)
def test_a_refusal_over_http2_or_grpc_has_the_status_of_its_answer(
    error: Exception, http: Any, status: int | None
) -> None:
    """Without an exchange, which only uvicorn's HTTP/1 has."""
    recorder = Memory()
    observer = ServingObserver(Trackers.of(SGLANG, recorder, DEFAULTS))
    found: dict[str, Any] = {each.role: each for each in observer.observations()}
    request = SimpleNamespace(rid="r", is_single=True, stream=False, sampling_params={}, received_time=0)
    call = SimpleNamespace(served_model_name="mini"), request
    token = found["serve_request"].enter((*call, http), {})
    found["receive_request"].exit(found["receive_request"].enter(call, {}), None, None)
    found["serve_request"].exit(token, None, error)
    (root,) = recorder.ended
    assert (root.error, root.values[-1]) == (type(error).__name__, status)


@pytest.mark.parametrize(
    ("role", "code", "error", "reaches_engine", "seen"),
    [
        ("answer_rpc", None, None, True, ("", None)),
        ("answer_rpc", None, asyncio.CancelledError(), True, ("CancelledError", None)),
        ("answer_rpc", "INVALID_ARGUMENT", ValueError(), True, ("ValueError", 400)),
        ("answer_rpc", "INVALID_ARGUMENT", ValueError(), False, ("400", 400)),
        ("answer_embedding_rpc", "UNAVAILABLE", ValueError(), False, ("503", 503)),
        ("answer_rpc", None, RuntimeError(), False, ("500", 500)),
        ("answer_rpc", None, asyncio.CancelledError(), False, ("abort", None)),
    ],
)
def test_a_call_of_a_grpc_server_has_its_callers_trace_and_the_status_of_its_answer(
    role: str,
    code: str | None,
    error: Any,
    reaches_engine: bool,
    seen: tuple[str, int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM drops its callers' headers, and its servicer refuses calls before there is a request."""
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.async_llm", ModuleType("async_llm"))
    recorder = Memory()
    trackers = Trackers.of(VLLM, recorder, DEFAULTS)
    observers = RpcObserver(trackers), ServingObserver(trackers)
    found = {each.role: each for observer in observers for each in observer.observations()}
    metadata = [*parent(3).items(), ("key-bin", b"\xff")]
    call = SimpleNamespace(
        invocation_metadata=lambda: metadata, code=lambda: code and SimpleNamespace(name=code)
    )
    rpc = found[role].enter((object(), object(), call), {})
    if reaches_engine:
        request = SimpleNamespace(
            request_id="r",
            external_req_id="r",
            sampling_params=SimpleNamespace(n=1, output_kind=None),
            pooling_params=None,
            lora_request=None,
            priority=0,
            trace_headers=None,
        )
        llm = SimpleNamespace(model_config=SimpleNamespace(served_model_name="mini"), vllm_config=None)
        serving = found["serve_request"].enter((llm,), {})
        found["receive_request"].exit(found["receive_request"].enter((request,), {}), None, None)
        found["serve_request"].exit(serving, None, error)
    found[role].exit(rpc, None, error)
    (begun,) = (event for event in recorder.events if isinstance(event, RequestBegin))
    (root,) = recorder.ended
    assert f"{begun.trace_id:032x}" == trace_id(3)
    assert begun.name == ("embeddings" if "embedding" in role else "text_completion") + (
        " mini" * reaches_engine
    )
    assert (root.error, root.values[-1]) == seen


def test_a_request_that_its_scheduler_refuses_has_the_status_of_the_answer() -> None:
    """Also in a stream, whose own status was sent before."""
    recorder = Memory()
    trackers = Trackers.of(SGLANG, recorder, DEFAULTS)
    found = {each.role: each for each in ServingObserver(trackers).observations()}
    for rid in ("in a batch", "in the queue"):
        call = trackers.calls.live[rid] = Call(1, rid, 1, TraceContext(5, 7, True, "", False), "chat mini")
        call.exchange = Exchange({"path": "/generate"}, 1, first_ns=1, status=200)
    reason = {"type": "abort", "status_code": HTTPStatus.BAD_REQUEST, "err_type": "BadRequestError"}
    outputs = SimpleNamespace(
        rids=["in a batch"], finished_reasons=[reason], prompt_tokens=[1], completion_tokens=[1]
    )
    found["receive_outputs"].enter((None, outputs), {})
    busy = {"type": "abort", "status_code": 503, "err_type": "SERVICE_UNAVAILABLE"}
    found["receive_abort"].enter((None, SimpleNamespace(rid="in the queue", finished_reason=busy)), {})
    assert [(root.error, root.values[-1]) for root in recorder.ended] == [
        ("BadRequestError", 400),
        ("SERVICE_UNAVAILABLE", 503),
    ]
    assert [type(root.values[-1]) for root in recorder.ended] == [int, int]


def test_an_answer_that_its_server_cannot_send_is_an_error() -> None:
    recorder = Memory()
    trackers = Trackers.of(SGLANG, recorder, DEFAULTS)
    exchange = Exchange({"path": "/v1/completions"}, monotonic_ns())
    call = Call(
        recorder.new_id(), "a", exchange.start_ns, TraceContext(5, 7, True, "", False), "text_completion mini"
    )
    call.exchange, call.streams, call.tokens = exchange, False, (3, 4, 0)
    trackers.calls.end(call, "length")
    assert not recorder.ended  # until its response is sent
    exchange.status = 500
    for end in exchange.at_end:
        end()
    (root,) = recorder.ended
    assert (root.error, root.values[-1]) == ("500", 500)
    assert [*root.values[3:6]] == [3, 4, 0]


def test_a_prompt_that_comes_in_parts_is_one_request_until_the_last_is_answered() -> None:
    """vLLM's /v1/realtime: each part is answered, with a reason why it ended."""
    recorder = Memory()
    trackers = Trackers.of(VLLM, recorder, DEFAULTS)
    found = {each.role: each for each in ServingObserver(trackers).observations()}
    call = Call(recorder.new_id(), "a", 1, TraceContext(5, 7, True, "", False), "text_completion mini")
    trackers.calls.live["a"] = call
    processor = SimpleNamespace(request_states={"a": object()})
    for is_last in (False, True):
        prefill = None if is_last else SimpleNamespace(num_prompt_tokens=3, num_cached_tokens=0)
        output = SimpleNamespace(
            request_id="a", finish_reason="length", prefill_stats=prefill, new_token_ids=[8, 9]
        )
        token = found["receive_outputs"].enter((processor, [output]), {})
        if is_last:
            processor.request_states.clear()
        found["receive_outputs"].exit(token, SimpleNamespace(reqs_to_abort=[]), None)
        assert bool(recorder.ended) is is_last
    (root,) = recorder.ended
    values = dict(zip(root.type.attributes, root.values))
    assert (root.error, values["gen_ai.usage.output_tokens"]) == ("", 4)


def test_an_aborted_request_has_its_detokenizing_also_in_a_process_that_detokenizes_many() -> None:
    """vLLM's, where an abort is no output: a span of its own, and no trace in the next one with its id."""
    recorder = Memory()
    calls = Trackers.of(VLLM, recorder, DEFAULTS).calls
    for times in (2, 1):
        origin = TraceContext(5, 7, True, "", False)
        calls.live["a"] = Call(recorder.new_id(), "a", monotonic_ns(), origin, "chat mini")
        for start_ns in range(times):
            calls.detokenized_here("a", start_ns, start_ns + 1, 1, is_last=False)
        calls.abort("a")
    assert [span.type for span in recorder.ended] == [DETOKENIZE, REQUEST] * 2
    first, root, second, _ = recorder.ended
    assert (first.root_id, first.parent_id) == (root.span_id, root.span_id)
    assert (first.values[0], second.values[0]) == (2, 1)


class _RefusedError(ValueError):
    pass


@pytest.mark.parametrize(
    ("roles", "operation"),
    [(["serve_request"], "text_completion"), (["submit_requests", "submit_request"], "chat")],
)
def test_what_an_engine_refuses_before_it_is_a_request_is_one_without_a_server_too(
    roles: list[str], operation: str
) -> None:
    """Of a program's list, each call of which fails likewise, one: the rest is not submitted.

    Of two at once the second one's error may have the identity of the first one's, which is gone.
    """
    recorder = Memory()
    trackers = Trackers.of(VLLM, recorder, DEFAULTS)
    assert VLLM.observers is not None
    loop = Loop([*ServingObserver(trackers).observations(), *VLLM.observers(trackers)])
    calls = ["submit_chats"] * (operation == "chat") + roles
    error = _RefusedError()

    def enter() -> list[tuple[Any, Any]]:
        return [(loop.found[role], loop.found[role].enter((object(),), {})) for role in calls]

    def leave(tokens: list[tuple[Any, Any]]) -> None:
        for observation, token in reversed(tokens):
            observation.exit(token, None, error)

    contexts = [copy_context(), copy_context()]
    entered = [each.run(enter) for each in contexts]
    for each, tokens in zip(contexts, entered):
        each.run(leave, tokens)
    begun = [record.name for record in recorder.events if isinstance(record, RequestBegin)]
    assert begun == [operation] * 2
    assert [(root.type, root.error) for root in recorder.ended] == [(REQUEST, "_RefusedError")] * 2


def test_a_callers_context_that_a_front_end_in_rust_hands_on_is_used() -> None:
    recorder = Memory()
    calls = Trackers.of(VLLM, recorder, DEFAULTS).calls
    sampling = SimpleNamespace(n=1)
    caller = {"traceparent": f"00-{5:032x}-{7:016x}-01"}
    for rid, headers in (("chatcmpl-a-0749a629", caller), ("cmpl-a-0749a62a", None)):
        message = SimpleNamespace(
            request_id=rid,
            arrival_time=0.0,
            sampling_params=sampling,
            trace_headers=headers,
            status="WAITING",
        )
        calls.begin_here(message, SimpleNamespace(), rid, 4)
    (first, second) = [record for record in recorder.events if isinstance(record, RequestBegin)]
    assert (first.trace_id, first.parent_id, first.name) == (5, 7, "chat unknown")
    assert second.trace_id != 5
    assert (second.parent_id, second.name) == (0, "text_completion unknown")


def test_what_a_scheduler_refuses_has_no_usage_without_a_front_end_in_python_either() -> None:
    recorder = Memory()
    calls = Trackers.of(SGLANG, recorder, DEFAULTS).calls
    for rid, fed, output, problem in (("refused", 0, 1, "rejected"), ("left", 4, 3, "abort")):
        message = SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(n=1))
        calls.begin_here(message, SimpleNamespace(server_args=None), rid, 4)
        calls.end_here(rid, fed, output, "abort", problem)
    usage = [span.values[3:5] for span in recorder.named("request")]
    assert usage == [[None, None], [4, 3]]


def test_a_parser_that_calls_another_is_counted_once() -> None:
    trackers = Trackers.of(SGLANG, Memory(), DEFAULTS)
    observations = {each.role: each for each in ServingObserver(trackers).observations()}
    parse, exchange = observations["parse_output"], Exchange({}, monotonic_ns())
    started_ns, token = monotonic_ns(), current_exchange.set(exchange)
    try:
        outer = parse.enter((), {})
        inner = parse.enter((), {})
        sum(range(10_000))
        parse.exit(inner, None, None)
        assert exchange.parsed_ns == 0
        parse.exit(outer, None, ValueError())
    finally:
        current_exchange.reset(token)
    assert 0 < exchange.parsed_ns <= monotonic_ns() - started_ns
    assert parse.enter((), {}) is None
