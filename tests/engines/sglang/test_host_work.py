"""Real SGLang: what its host does for requests and for the server: grammars, templates, adapters, pauses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.support import unpinned
from tests.support.callers import Requests, by_trace, parent
from tests.support.distributions import install_plugin
from tests.support.host_work import (
    chat_with_tools,
    check_chat_template,
    check_parsing,
    check_server_events,
    has_ended,
)
from tests.support.phases import engine_receiver, run_prefix
from tests.support.sglang_models import make_adapter, make_mini
from tests.support.sglang_server import Server, serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

JSON, AGAIN, REGEX, CHAT, RESPONSE, OLLAMA, BASE, ADAPTED, WHOLE, STREAMED, *PAUSED = range(13)
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}}'
GRAMMARS = {JSON: {"json_schema": SCHEMA}, AGAIN: {"json_schema": SCHEMA}, REGEX: {"regex": "[a-z]{3}"}}
OPTIONS = (
    *("--enable-lora", "--max-lora-rank", "8"),
    *("--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3"),
    *("--lora-target-modules", "q_proj", "k_proj", "v_proj", "--lora-backend", "torch_native"),
)


def generation(number: int, tokens: int = 4, sampling: Any = None, **more: Any) -> dict[str, Any]:
    settings = {"max_new_tokens": tokens, "temperature": 0, **(sampling or {"ignore_eos": True})}
    return {"text": f"{number} a fox", "sampling_params": settings, **more}


def generate(server: Server, number: int, *settings: Any, **more: Any) -> None:
    server.post("/generate", generation(number, *settings, **more), parent(number))


def drive(server: Server, adapter: Path) -> None:
    for number, grammar in GRAMMARS.items():
        generate(server, number, 30, grammar)
    chat = {"model": "mini", "max_tokens": 4, "messages": [{"role": "user", "content": "tell me"}]}
    server.post("/v1/chat/completions", chat, parent(CHAT))
    server.post("/api/chat", {**chat, "stream": False, "options": {"num_predict": 4}}, parent(OLLAMA))
    response = {"model": "mini", "input": "tell me", "max_output_tokens": 4}
    server.post("/v1/responses", response, parent(RESPONSE))
    chat_with_tools(server, WHOLE, STREAMED)
    server.tell("/load_lora_adapter", {"lora_name": "pirate", "lora_path": str(adapter)})
    generate(server, BASE)
    generate(server, ADAPTED, lora_path="pirate")
    with server.all_streaming(("/generate", generation(number, 600), parent(number)) for number in PAUSED):
        server.tell("/pause_generation", {"mode": "in_place"})
        server.tell("/continue_generation", {})
    server.tell("/unload_lora_adapter", {"lora_name": "pirate"})
    assert server.get("/flush_cache") == 200


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Requests]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "plugin").mkdir()
    install_plugin(folder / "plugin", "unpinned", unpinned.PLUGIN)
    model = make_mini(folder / "mini")
    adapter = make_adapter(model, folder / "adapter")
    with engine_receiver() as receiver:
        prefix = run_prefix(receiver, level=2)
        environment = {
            "PYTHONPATH": os.pathsep.join([str(folder / "plugin"), os.environ.get("PYTHONPATH", "")]),
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }
        with serve(model, folder / "log", prefix=prefix, more=OPTIONS, environment=environment) as server:
            drive(server, adapter)
            receiver.wait_for(lambda spans: has_ended(spans, 13))
        yield Requests(receiver, by_trace(receiver.spans))


@pytest.mark.parametrize(("number", "kind"), [(JSON, "json"), (REGEX, "regex")])
def test_a_request_waits_for_its_grammar_in_a_phase_of_its_own(run: Requests, number: int, kind: str) -> None:
    (grammar,), (queue,) = run.spans(number, "grammar"), run.spans(number, "queue")
    assert grammar.attributes["sgl_aspects.grammar.kind"] == kind
    assert grammar.parent_id == run.root(number).span_id
    assert grammar.end == queue.start
    assert run.root(number).attributes.get("gen_ai.output.type") == ("json" if kind == "json" else None)


def test_a_grammar_that_is_known_is_not_waited_for(run: Requests) -> None:
    assert not run.spans(AGAIN, "grammar")
    assert run.spans(AGAIN, "queue")


@pytest.mark.parametrize("number", [CHAT, RESPONSE, OLLAMA])
def test_the_chat_template_precedes_the_queue(run: Requests, number: int) -> None:
    check_chat_template(run, number)


def test_what_parsing_an_answer_took_is_on_its_request(run: Requests) -> None:
    check_parsing(run, [WHOLE, STREAMED], not_parsed=[BASE, JSON])


def test_an_adapter_is_on_its_request_and_metrics(run: Requests) -> None:
    for number, name in ((BASE, "mini"), (ADAPTED, "pirate")):
        root = run.root(number)
        assert root.attributes["gen_ai.request.model"] == name
        assert root.attributes["gen_ai.response.model"] == "mini"
        waits = [wait.attributes["sgl_aspects.adapter"] for wait in run.spans(number, "wait_for_adapter")]
        assert waits == (["pirate"] if number == ADAPTED else [])
        link = root.trace_id, root.span_id
        steps = [step for step in run.receiver.named("scheduler.step") if link in step.links]
        adapters = {str(step.attributes.get("sgl_aspects.adapters")) for step in steps}
        assert adapters == ({"['pirate']"} if number == ADAPTED else {"None"})
    points = run.receiver.points("gen_ai.server.request.duration")
    assert {point.attributes["gen_ai.request.model"] for point in points} == {"mini", "pirate"}


def test_loading_and_unloading_an_adapter_are_spans(run: Requests) -> None:
    for name in ("load_adapter", "unload_adapter"):
        (span,) = run.receiver.named(name)
        assert span.attributes["sgl_aspects.adapter"] == "pirate"
        assert span.end > span.start


def test_what_happens_to_the_server_is_linked_to_the_requests_under_way(run: Requests) -> None:
    check_server_events(run, PAUSED)


def test_the_start_of_the_engine_has_its_parts_below_it(run: Requests) -> None:
    (start,) = run.receiver.named("start_engine")
    for name in ("load_model", "init_kv_cache"):
        (part,) = run.receiver.named(name)
        assert (part.trace_id, part.parent_id) == (start.trace_id, start.span_id)
        assert start.start <= part.start < part.end <= start.end
