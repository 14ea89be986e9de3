"""Real vLLM, unmodified, on the CPU, with two API servers: traced with no launcher, beside its own tracing
(make test-vllm).
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.support.callers import CALLER, by_trace, one, orphans, parent, trace_id
from tests.support.engine_server import Answer, EngineServer
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import assert_first_tokens_as_seen, engine_receiver
from tests.support.processes import wait_until
from tests.support.sglang_models import make_mini
from tests.support.vllm_server import serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPTS = [f"the quick brown fox number {number} jumps" + " over" * (number % 7) for number in range(16)]
CHILDREN = ["tokenize", "queue", "prefill", "decode", "detokenize"]
#: Blocks of the KV cache: four answers of 800 tokens do not fit.
BLOCK, BLOCKS = 32, 70
#: Requests of ``MOST`` tokens whose client hangs up.
LEFT, MOST = (105, *range(130, 135)), 900
LONG = 4
#: The last requests of ours; vLLM's own spans come sooner.
LAST = {(f"{111 + number:032x}", "text_completion mini") for number in range(LONG)}
PARTS = "one part of a prompt that is longer than a batch may be " * 12


@dataclass
class Run:
    """The results of a server. ``untraced``: the answers to the same prompts with tracing off."""

    server: EngineServer
    receiver: Receiver
    cache: Path
    answers: list[Answer] = field(default_factory=list)
    untraced: list[Answer] = field(default_factory=list)
    without_backend: list[Answer] = field(default_factory=list)
    alone: list[Answer] = field(default_factory=list)
    stopped: dict[str, Any] = field(default_factory=dict)
    top: str = ""
    traces: dict[str, list[Span]] = field(default_factory=dict)
    theirs: list[Span] = field(default_factory=list)


def complete(server: EngineServer, number: int, prompt: Any, *, status: int = 200, **body: Any) -> Any:
    asked = {"model": "mini", "prompt": prompt, "temperature": 0, "max_tokens": 4, **body}
    return server.post("/v1/completions", asked, parent(number), status=status)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """`vllm serve` with nothing but variables; its own tracing is on, too."""
    folder = tmp_path_factory.mktemp("run")
    model = make_mini(folder / "mini")
    with contextlib.ExitStack() as backend:
        receiver = backend.enter_context(engine_receiver())
        environment = {
            "SGL_ASPECTS_TRACE": "4",
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_METRIC_EXPORT_INTERVAL": "1000",
            "VLLM_CACHE_ROOT": str(folder / "cache"),
        }
        options = ["--api-server-count", "2", "--dtype", "float32", "--max-num-batched-tokens", "256"]
        options += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS)]
        options += ["--otlp-traces-endpoint", f"{receiver.endpoint}/v1/traces"]
        with serve(model, folder / "log", more=options, environment=environment) as server:
            found = Run(server, receiver, folder / "cache")
            found.answers = server.chats(PROMPTS, [parent(number) for number in range(len(PROMPTS))])
            found.alone = [server.chat(f"alone {turn}", headers=parent(200 + turn)) for turn in range(5)]
            complete(server, 101, "two", n=2, ignore_eos=True, temperature=1)
            complete(server, 102, ["one", "and another"], ignore_eos=True)
            complete(server, 103, "x " * 2000, status=400)
            server.post("/v1/completions", {"model": "nobody", "prompt": "x"}, parent(104), status=404)
            long = {"model": "mini", "prompt": "the", "ignore_eos": True, "stream": True, "max_tokens": MOST}
            for number in LEFT:
                server.leave("/v1/completions", long, parent(number))
            whole = complete(server, 106, "the", max_tokens=40, ignore_eos=True)["choices"][0]["text"]
            found.stopped = complete(server, 107, "the", max_tokens=40, ignore_eos=True, stop=whole[12:15])
            complete(server, 108, PARTS, ignore_eos=True)
            requests = [
                {"path": "/v1/completions", "headers": parent(110 + number), "body": body}
                for number in range(LONG)
                for body in [{**long, "max_tokens": 800, "prompt": f"{number} times"}]
            ]
            with ThreadPoolExecutor() as pool:
                results = pool.submit(server.exchange, requests)
                found.top = server.command("top", "--once")
            assert all(result["status"] == 200 for result in results.result())
            server.command("control", "--level", "0")
            found.untraced = server.chats(PROMPTS, [parent(300 + number) for number in range(len(PROMPTS))])
            receiver.wait_for(lambda spans: {(s.trace_id, s.name) for s in spans} >= LAST, seconds=300)
            server.command("control", "--level", "4")
            backend.close()
            callers = [parent(400 + number) for number in range(len(PROMPTS))]
            found.without_backend = server.chats(PROMPTS, callers)
        found.theirs = receiver.named("llm_request")
        found.traces = by_trace(span for span in receiver.spans if span.name != "llm_request")
        yield found


def test_each_concurrent_request_has_a_whole_trace_under_its_callers_id(run: Run) -> None:
    for number, answer in enumerate(run.answers):
        spans = run.traces[trace_id(number)]
        assert sorted({span.name for span in spans}) == sorted([*CHILDREN, "chat_template", "chat mini"])
        root = one(spans, "chat mini")
        assert root.parent_id == CALLER
        assert {span.parent_id for span in spans if span is not root} == {root.span_id}
        assert root.attributes["gen_ai.request.id"].startswith(answer.rid)
        assert root.attributes["gen_ai.provider.name"] == "vllm"
        tokenize, queue, decode = (one(spans, name) for name in ("tokenize", "queue", "decode"))
        prefill = min((span for span in spans if span.name == "prefill"), key=lambda span: span.start)
        assert root.start <= tokenize.start <= tokenize.end <= queue.start <= prefill.start < decode.start
        assert decode.end <= root.end
        assert len({span.resource["process.pid"] for span in spans}) == 2


def test_both_api_servers_answered(run: Run) -> None:
    """Whichever of them is awake takes all connections that wait: those of one burst may all be one's."""
    roots = [span for spans in run.traces.values() for span in spans if span.parent_id == CALLER]
    assert len({root.resource["process.pid"] for root in roots}) == 2


def test_no_span_is_an_orphan(run: Run) -> None:
    assert orphans(run.traces) == []
    assert [span.name for span in run.receiver.spans if span.attributes.get("sgl_aspects.unfinished")] == []


def test_token_counts_are_those_of_the_responses(run: Run) -> None:
    for number, answer in enumerate(run.answers):
        spans = run.traces[trace_id(number)]
        attributes = one(spans, "chat mini").attributes
        assert attributes["gen_ai.usage.input_tokens"] == answer.usage["prompt_tokens"]
        assert attributes["gen_ai.usage.output_tokens"] == answer.usage["completion_tokens"]
        assert attributes["gen_ai.response.finish_reasons"] == [answer.finish_reason]
        chunks = [span.attributes["sgl_aspects.prefill.tokens"] for span in spans if span.name == "prefill"]
        cached = attributes["gen_ai.usage.cache_read.input_tokens"]
        assert sum(chunks) == answer.usage["prompt_tokens"] - cached


def test_tokens_are_the_same_with_tracing_and_without(run: Run) -> None:
    assert [answer.text for answer in run.answers] == [answer.text for answer in run.untraced]


def test_time_to_first_token_is_what_each_client_saw(run: Run) -> None:
    requests = [*enumerate(run.answers), *((200 + turn, answer) for turn, answer in enumerate(run.alone))]
    roots = [one(run.traces[trace_id(number)], "chat mini") for number, _ in requests]
    assert_first_tokens_as_seen([*zip(roots, (answer for _, answer in requests))], 2)


def test_several_answers_are_children_of_one_request(run: Run) -> None:
    spans = run.traces[trace_id(101)]
    roots = [span for span in spans if span.name == "text_completion mini"]
    (root,) = [span for span in roots if span.parent_id == CALLER]
    answers = [span for span in roots if span is not root]
    assert [span.parent_id for span in answers] == [root.span_id] * 2
    assert root.attributes["gen_ai.request.choice.count"] == 2
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"] * 2
    assert root.attributes["gen_ai.usage.input_tokens"] == answers[0].attributes["gen_ai.usage.input_tokens"]
    assert root.attributes["gen_ai.usage.output_tokens"] == 2 * 4
    decodes = {span.parent_id for span in spans if span.name == "decode"}
    assert decodes == {span.span_id for span in answers}


def test_each_prompt_of_a_list_is_a_request_with_its_own_tokenization(run: Run) -> None:
    spans = run.traces[trace_id(102)]
    roots = [span for span in spans if span.name == "text_completion mini"]
    assert [span.parent_id for span in roots] == [CALLER] * 2
    for root in roots:
        (tokenize,) = [span for span in spans if span.name == "tokenize" and span.parent_id == root.span_id]
        counts = [span.attributes["gen_ai.usage.input_tokens"] for span in (tokenize, root)]
        assert counts[0] == counts[1]


@pytest.mark.parametrize(("number", "status"), [(103, 400), (104, 404)])
def test_a_refused_request_ends_with_its_status(run: Run, number: int, status: int) -> None:
    spans = run.traces[trace_id(number)]
    (root,) = [span for span in spans if span.parent_id == CALLER]
    assert not root.is_error  # its caller's mistake
    assert root.attributes["error.type"]
    assert root.attributes["http.response.status_code"] == status
    assert root.attributes["gen_ai.operation.name"] == "text_completion"


def test_a_client_that_hangs_up_ends_its_request_everywhere(run: Run) -> None:
    outcomes = []
    for spans in (run.traces[trace_id(number)] for number in LEFT):
        root, decode = one(spans, "text_completion mini"), one(spans, "decode")
        reason = decode.attributes["sgl_aspects.finish_reason"]
        assert root.attributes.get("error.type") == (None if reason == "length" else reason)
        outcomes.append((reason, decode.attributes["gen_ai.usage.output_tokens"] < MOST))
    # On a busy machine vLLM may notice it only after the last token, untraced, too (17 of 60 times).
    assert set(outcomes) <= {("abort", True), ("length", False)}
    assert ("abort", True) in outcomes


def test_a_stop_string_is_not_an_abort(run: Run) -> None:
    assert run.stopped["choices"][0]["finish_reason"] == "stop"
    spans = run.traces[trace_id(107)]
    root = one(spans, "text_completion mini")
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert root.attributes["gen_ai.usage.output_tokens"] == run.stopped["usage"]["completion_tokens"]
    assert not any(span.is_error for span in spans)


def test_a_long_prompt_is_worked_on_chunk_by_chunk(run: Run) -> None:
    spans = run.traces[trace_id(108)]
    root = one(spans, "text_completion mini")
    chunks = sorted((span for span in spans if span.name == "prefill"), key=lambda span: span.start)
    tokens = [chunk.attributes["sgl_aspects.prefill.tokens"] for chunk in chunks]
    assert len(chunks) > 1
    assert sum(tokens) == root.attributes["gen_ai.usage.input_tokens"]
    assert [chunk.attributes["sgl_aspects.prefill.chunk"] for chunk in chunks] == [*range(len(chunks))]


def test_a_request_that_gives_way_is_queued_and_worked_on_again(run: Run) -> None:
    preempted = []
    for number in range(LONG):
        spans = run.traces[trace_id(110 + number)]
        root = one(spans, "text_completion mini")
        assert root.attributes["gen_ai.usage.output_tokens"] == 800
        counts = Counter(span.name for span in spans)
        retracted = [
            span for span in spans if span.attributes.get("sgl_aspects.finish_reason") == "retracted"
        ]
        # One preempted before its first token had not begun to decode.
        assert counts["queue"] >= counts["decode"] == len(retracted) + 1
        preempted += retracted
    assert preempted


def test_steps_are_linked_to_the_requests_that_they_serve(run: Run) -> None:
    roots = {
        (span.trace_id, span.span_id): span
        for number in range(len(PROMPTS))
        for span in run.traces[trace_id(number)]
        if span.name == "chat mini"
    }
    linked = Counter(link for step in run.receiver.named("scheduler.step") for link in set(step.links))
    for key, root in roots.items():
        assert linked[key] >= root.attributes["gen_ai.usage.output_tokens"]


def test_a_step_has_its_figures(run: Run) -> None:
    steps = run.receiver.named("scheduler.step")
    modes = {step.attributes["sgl_aspects.forward.mode"] for step in steps}
    assert {"prefill", "decode"} <= modes
    for step in steps:
        attributes = step.attributes
        assert attributes["sgl_aspects.batch.size"] >= 1
        assert attributes["sgl_aspects.batch.tokens"] >= attributes["sgl_aspects.batch.size"]
        assert 0 <= attributes.get("sgl_aspects.kv.usage", 0) <= 1
        names = [span.name for span in run.traces[step.trace_id] if span.parent_id == step.span_id]
        assert {"schedule", "run_batch", "process_result"} <= set(names)


def test_forward_passes_of_the_worker_belong_to_the_steps_that_scheduled_them(run: Run) -> None:
    steps = run.receiver.named("scheduler.step")
    for step in steps:
        spans = run.traces[step.trace_id]
        forward, sample, launch = (one(spans, name) for name in ("forward", "sample", "run_batch"))
        assert forward.parent_id == sample.parent_id == launch.span_id
        assert forward.resource["process.pid"] != step.resource["process.pid"]
        for key in ("sgl_aspects.forward.mode", "sgl_aspects.batch.tokens"):
            assert forward.attributes[key] == step.attributes[key]
        assert step.start <= forward.start < forward.end <= sample.end <= step.end
        assert forward.attributes["sgl_aspects.forward.device_time"] > 0


def test_prefix_cache_and_kv_cache_are_seen_in_detail(run: Run) -> None:
    names = Counter(span.name for span in run.receiver.spans)
    assert names["cache.match"] >= len(PROMPTS)
    assert names["kv.alloc"]
    assert names["kv.free"] >= len(PROMPTS)


def test_preparations_before_serving_are_recorded(run: Run) -> None:
    assert run.receiver.named("load_model")
    assert run.receiver.named("init_kv_cache")


def test_metrics_name_the_engine_by_its_provider_only(run: Run) -> None:
    points = run.receiver.points("gen_ai.server.request.duration")
    assert {point.attributes["gen_ai.provider.name"] for point in points} == {"vllm"}
    assert {point.attributes.get("error.type") for point in points} >= {None, "abort", "400", "404"}
    assert run.receiver.points("sgl_aspects.step.duration")


def test_top_shows_it_like_any_engine(run: Run) -> None:
    assert "mini" in run.top


def test_vllms_own_tracing_goes_on_beside_ours(run: Run) -> None:
    ours = {trace_id(number) for number in range(len(PROMPTS))}
    assert ours <= {span.trace_id for span in run.theirs}


def test_a_backend_that_is_down_costs_its_clients_nothing(run: Run) -> None:
    assert [answer.text for answer in run.without_backend] == [answer.text for answer in run.untraced]
    # Printed by the collector, which tries for some seconds after the server has ended.
    summary = re.compile(
        r"sgl-aspects collector: [\d,]+ spans recorded; otlp: [\d,]+ delivered, [1-9][\d,]* "
    )
    wait_until(lambda: summary.search(run.server.log.read_text()) is not None)


def test_its_compiled_model_is_saved_as_without_us(run: Run) -> None:
    assert [*run.cache.rglob("torch_aot_compile/**/model")]
    log = run.server.log.read_text()
    assert "not the same object" not in log
    assert "ailed to save" not in log


def test_no_observer_failed(run: Run) -> None:
    assert "the call went on without it" not in run.server.log.read_text()
