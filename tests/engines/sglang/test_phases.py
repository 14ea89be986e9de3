"""Real SGLang with little memory, small chunks and a pause: what its requests wait for and are fed is counted
once. The receiver checks the rule of phases on every request (tests/support/phases.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("sglang")

from tests.support.callers import CALLER, by_trace, parent, trace_id
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import engine_receiver
from tests.support.sglang_models import make_mini
from tests.support.sglang_server import Server, serve

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

CHUNK, MEMORY = 32, 900
#: Numbers of the requests: a long prompt alone; beside answers; answers that do not fit together; one that
#: another displaces; those that a pause interrupts.
LONG, BESIDE, MANY, DISPLACED, PAUSED = 1, range(10, 26), range(30, 35), (40, 41), range(50, 53)


@dataclass
class Run:
    traces: dict[str, list[Span]]

    def of(self, number: int) -> list[Span]:
        return sorted(self.traces[trace_id(number)], key=lambda span: span.start)

    def named(self, number: int, name: str) -> list[Span]:
        return [span for span in self.of(number) if span.name == name]

    def root(self, number: int) -> Span:
        (root,) = [span for span in self.of(number) if span.parent_id == CALLER]
        return root


def generate(server: Server, number: int, words: int, tokens: int, **more: Any) -> None:
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}
    text = f"{number} " + "fox " * words
    server.post("/generate", {"text": text, "sampling_params": sampling, **more}, parent(number))


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


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("run")
    with engine_receiver() as receiver:
        prefix = [sys.executable, "-m", "sgl_aspects", "run", "--level", "2"]
        prefix += ["--endpoint", receiver.endpoint, "--"]
        more = ["--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk"]
        # It admits as many as may fit, and learns only later that they do not.
        more += ["--max-total-tokens", str(MEMORY), "--schedule-conservativeness", "0.1"]
        more += ["--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "2"]
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
        with serve(
            make_mini(folder / "mini"),
            folder / "log",
            prefix=prefix,
            more=more,
            environment=environment,
            without=("--max-total-tokens",),
        ) as server:
            drive(server, receiver)
        receiver.wait_for(lambda spans: trace_id(PAUSED[-1]) in {span.trace_id for span in spans})
        yield Run(by_trace(receiver.spans))


def test_chunks_of_a_prompt_follow_each_other(run: Run) -> None:
    chunks, root = run.named(LONG, "prefill"), run.root(LONG)
    assert len(chunks) > 2
    fed = sum(chunk.attributes["sgl_aspects.prefill.tokens"] for chunk in chunks)
    assert fed == root.attributes["gen_ai.usage.input_tokens"]
    lasted = root.attributes["gen_ai.latency.time_in_model_prefill"]
    assert lasted <= root.attributes["gen_ai.latency.time_to_first_token"]


def test_a_request_that_decodes_in_a_batch_of_prompts_is_not_fed_again(run: Run) -> None:
    for number in BESIDE:
        fed = [chunk.attributes["sgl_aspects.prefill.tokens"] for chunk in run.named(number, "prefill")]
        cached = run.root(number).attributes.get("gen_ai.usage.cache_read.input_tokens", 0)
        assert sum(fed) + cached == run.root(number).attributes["gen_ai.usage.input_tokens"]


@pytest.mark.parametrize("numbers", [MANY, DISPLACED, PAUSED], ids=["memory", "priority", "pause"])
def test_an_interrupted_request_decodes_each_token_once(run: Run, numbers: tuple[int, ...]) -> None:
    interrupted = []
    for number in numbers:
        decodes = run.named(number, "decode")
        tokens = [decode.attributes["gen_ai.usage.output_tokens"] for decode in decodes]
        assert sum(tokens) == run.root(number).attributes["gen_ai.usage.output_tokens"]
        assert len(run.named(number, "queue")) == len(decodes)
        interrupted += [
            decode for decode in decodes if decode.attributes["sgl_aspects.finish_reason"] == "retracted"
        ]
    assert interrupted


def test_a_paused_request_waits_in_the_queue(run: Run) -> None:
    for number in PAUSED:
        waits = [span.end - span.start for span in run.named(number, "queue")]
        assert max(waits) > 0.9e9
