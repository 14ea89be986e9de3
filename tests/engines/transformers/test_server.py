"""transformers' own server, with and without continuous batching, traced by the launcher."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.callers import CALLER, Requests, by_trace, orphans, parent, trace_id
from tests.support.engine_server import EngineServer, start_server
from tests.support.otlp_receiver import Span
from tests.support.phases import engine_receiver, run_prefix
from tests.support.processes import free_port
from tests.support.tiny_models import llama_fixture

for package in ("fastapi", "accelerate"):
    pytest.importorskip(package)

SERVE = "from transformers.cli.transformers import main; main()"
PHASES = ["tokenize", "queue", "prefill", "decode"]
MOST_TOKENS = 64  # of a batch
CHATS, TEXTS = "/v1/chat/completions", "/v1/completions"


@dataclass
class Run(Requests):
    """The results of a server. ``answers``: the text of two responses, whole and streamed."""

    batches: bool
    answers: list[str]
    log: str


def is_left(span: Span) -> bool:
    """Whether it is that of the request whose client hung up."""
    return span.trace_id == trace_id(5) and span.parent_id == CALLER


model = llama_fixture()


@pytest.fixture(scope="module", params=[True, False], ids=["continuous batching", "one by one"])
def run(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    batches, port, folder, name = request.param, free_port(), tmp_path_factory.mktemp("run"), str(model)
    chat = {"model": name, "messages": [{"role": "user", "content": "hello fox"}], "temperature": 0}
    with engine_receiver() as receiver:
        words = [*run_prefix(receiver, level=4), sys.executable, "-c", SERVE, "serve", name]
        words += ["--port", str(port), "--host", "127.0.0.1"]
        words += ["--device", "cpu", "--cb-num-blocks", "64", "--cb-block-size", "16"]
        words += ["--cb-max-batch-tokens", str(MOST_TOKENS)]
        words += ["--continuous-batching"] if batches else []
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "100"}  # of 5 s, which is waited for below
        with start_server(EngineServer, words, port, folder / "log", environment) as server:
            whole = server.post(CHATS, {**chat, "max_tokens": 8}, parent(1))
            stream = {**chat, "max_tokens": 8, "stream": True}
            streamed = server.exchange([{"path": CHATS, "headers": parent(2), "body": stream}])
            answers = [json.dumps(whole), streamed[0]["text"]]
            server.post(CHATS, {**chat, "model": "nobody"}, parent(3), status=400)
            server.post(TEXTS, {"model": name, "prompt": "x" * 100, "max_tokens": 4}, parent(4))
            server.leave(CHATS, {**stream, "max_tokens": 400}, parent(5))
            receiver.wait_for(lambda spans: any(is_left(span) for span in spans))
    return Run(receiver, by_trace(receiver.spans), batches, answers, (folder / "log").read_text())


def test_no_span_is_an_orphan(run: Run) -> None:
    assert orphans(run.traces) == []


@pytest.mark.parametrize("number", [1, 2])
def test_a_request_has_a_whole_trace(run: Run, number: int) -> None:
    spans, root = run.of(number), run.root(number)
    assert [span.name for span in spans if span is not root] == PHASES
    assert not any(span.is_error for span in spans)
    assert root.attributes["gen_ai.provider.name"] == "transformers"
    assert root.attributes["gen_ai.request.stream"] is (number == 2)
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
    text = run.answers[number - 1]
    usage = json.loads(text[text.rindex('"usage":') + len('"usage":') :].split("}")[0] + "}")
    assert root.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 8
    assert all(root.start <= span.start <= span.end <= root.end for span in spans)


def test_a_refused_request_ends_with_its_status(run: Run) -> None:
    assert [span.name for span in run.of(3)] == ["chat"]
    assert not run.root(3).is_error  # its caller's mistake
    assert run.root(3).attributes["http.response.status_code"] == 400


def test_a_long_prompt_is_worked_on_in_chunks_where_there_are_batches(run: Run) -> None:
    chunks = [span.attributes["sgl_aspects.prefill.tokens"] for span in run.of(4) if span.name == "prefill"]
    assert chunks == ([MOST_TOKENS, 100 - MOST_TOKENS] if run.batches else [100])


def test_a_client_that_hangs_up_ends_its_request(run: Run) -> None:
    assert run.root(5).attributes["error.type"] == "abort"
    reasons = [span.attributes.get("sgl_aspects.finish_reason") for span in run.of(5)]
    # Without a scheduler it is over between two phases where that comes before the first token.
    assert "abort" in reasons or not run.batches


def test_steps_are_there_where_there_is_a_scheduler(run: Run) -> None:
    steps = run.receiver.named("scheduler.step")
    if not run.batches:
        assert not steps
        return
    linked = Counter(link for step in steps for link in set(step.links))
    for number in (1, 2, 4):
        root = run.root(number)
        assert linked[root.trace_id, root.span_id] >= root.attributes["gen_ai.usage.output_tokens"]
    for step in steps:
        names = Counter(span.name for span in run.traces[step.trace_id])
        for name in ("schedule", "run_batch", "forward", "process_result"):
            assert names[name] == 1


def test_the_loaded_model_is_recorded(run: Run) -> None:
    assert len(run.receiver.named("load_model")) == 1


def test_no_observer_failed(run: Run) -> None:
    assert "the call went on without it" not in run.log
