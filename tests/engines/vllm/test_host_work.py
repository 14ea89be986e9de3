"""Real vLLM: what its host does for requests and for the server: grammars, templates, adapters, pauses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.support.callers import Requests, by_trace, parent
from tests.support.engine_server import EngineServer
from tests.support.host_work import (
    chat_with_tools,
    check_chat_template,
    check_parsing,
    check_server_events,
    has_ended,
)
from tests.support.phases import engine_receiver, run_prefix
from tests.support.sglang_models import make_adapter, make_mini
from tests.support.vllm_server import serve

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

GRAMMAR, AGAIN, CHAT, ADAPTED, WHOLE, STREAMED, THOUGHT, REFUSED, *PAUSED = range(11)
#: The small model's tokenizer has other tokens than a reasoning model's: all that comes before the last of
#: them is reasoning.
REASONING = """
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

@ReasoningParserManager.register_module("mini")
class Mini(DeepSeekR1ReasoningParser):
    start_token, end_token = "<|start|>", "<|text|>"
"""
#: Large enough that compiling it takes longer than the way to the scheduler.
SCHEMA = {
    "type": "object",
    "properties": {
        f"name{n}": {"type": "string", "pattern": f"^[a-z]{{{n + 1},{n + 40}}}$"} for n in range(40)
    },
}


def completion(number: int, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "mini", "prompt": f"{number} a fox", "max_tokens": tokens, "temperature": 0, **more}


def drive(server: EngineServer, adapter: Path) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "names", "schema": SCHEMA}}
    chat = {"model": "mini", "max_tokens": 20, "messages": [{"role": "user", "content": "tell me"}]}
    for number in (GRAMMAR, AGAIN):
        server.post("/v1/chat/completions", {**chat, "response_format": form}, parent(number))
    bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "nonsense"}}}
    server.post("/v1/chat/completions", {**chat, "response_format": bad}, parent(REFUSED), status=400)
    said = server.post("/v1/chat/completions", chat, parent(CHAT))["choices"][0]["message"]
    assert said["reasoning"]
    assert not said["content"]
    with server.all_streaming([("/v1/chat/completions", chat, parent(THOUGHT))]):
        pass
    chat_with_tools(server, WHOLE, STREAMED)
    loaded = {"lora_name": "pirate", "lora_path": str(adapter)}
    server.tell("/v1/load_lora_adapter", loaded)
    server.post("/v1/completions", completion(ADAPTED, 4, model="pirate"), parent(ADAPTED))
    with server.all_streaming(
        ("/v1/completions", completion(number, 900, ignore_eos=True), parent(number)) for number in PAUSED
    ):
        server.tell("/pause?mode=keep", {})
        server.tell("/resume", {})
    server.tell("/reset_prefix_cache", {})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Requests:
    folder = tmp_path_factory.mktemp("run")
    model = make_mini(folder / "mini")
    adapter = make_adapter(model, folder / "adapter")
    with engine_receiver() as receiver:
        # vLLM loads plugins when its engine core has begun to start: this launcher is there before.
        prefix = run_prefix(receiver, level=2)
        options = ["--dtype", "float32", "--enforce-eager", "--enable-lora"]
        options += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
        (folder / "reasoning.py").write_text(REASONING)
        options += ["--reasoning-parser", "mini", "--reasoning-parser-plugin", str(folder / "reasoning.py")]
        environment = {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        with serve(model, folder / "log", prefix=prefix, more=options, environment=environment) as server:
            drive(server, adapter)
            receiver.wait_for(lambda spans: has_ended(spans, 11))
    return Requests(receiver, by_trace(receiver.spans))


def test_a_request_waits_for_its_grammar_in_a_phase_of_its_own(run: Requests) -> None:
    (grammar,), (queue,) = run.spans(GRAMMAR, "grammar"), run.spans(GRAMMAR, "queue")
    assert grammar.attributes["sgl_aspects.grammar.kind"] == "json"
    assert grammar.parent_id == run.root(GRAMMAR).span_id
    assert grammar.end == queue.start
    for number in (GRAMMAR, AGAIN, CHAT):
        wanted = None if number == CHAT else "json"
        assert run.root(number).attributes.get("gen_ai.output.type") == wanted


def test_a_grammar_that_is_none_is_refused(run: Requests) -> None:
    root = run.root(REFUSED)
    assert root.attributes["error.type"] == "400"
    assert root.attributes["http.response.status_code"] == 400


def test_the_chat_template_precedes_the_queue(run: Requests) -> None:
    check_chat_template(run, CHAT)


def test_what_parsing_an_answer_took_is_on_its_request(run: Requests) -> None:
    """Answers with a tool, whole and streamed, and answers that are reasoning."""
    check_parsing(run, [WHOLE, STREAMED, CHAT, THOUGHT], not_parsed=[ADAPTED])


def test_loading_an_adapter_is_a_span(run: Requests) -> None:
    assert run.root(ADAPTED).attributes["gen_ai.request.model"] == "pirate"
    (load,) = run.receiver.named("load_adapter")
    assert load.attributes["sgl_aspects.adapter"] == "pirate"
    assert load.end > load.start


def test_what_happens_to_the_server_is_linked_to_the_requests_under_way(run: Requests) -> None:
    check_server_events(run, PAUSED)


def test_the_start_of_the_engine_is_a_span(run: Requests) -> None:
    (start,) = run.receiver.named("start_engine")
    (load,) = run.receiver.named("load_model")
    assert start.start < load.start < load.end < start.end
