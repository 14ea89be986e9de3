"""Real vLLM with requests of all kinds: embeddings, scores, adapters, beam search, and without a server (make
test-vllm).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import finished, output_of

pytest.importorskip("vllm")

from tests.support.callers import CALLER, by_trace, orphans, parent, trace_id
from tests.support.otlp_receiver import Receiver, Span
from tests.support.phases import (
    assert_first_tokens_as_seen,
    assert_whole,
    engine_receiver,
    run_prefix,
)
from tests.support.sglang_models import make_adapter, make_mini
from tests.support.vllm_server import ENVIRONMENT, serve, traced

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

EMBEDDING, POOLING, SCORES, RANKS, BASE, ADAPTED, BEAMS, LIST = range(8)
WIDTH, BEAM_TOKENS = 3, 6


@dataclass
class Run:
    receiver: Receiver
    answers: dict[int, Any]

    def __post_init__(self) -> None:
        self.traces = by_trace(self.receiver.spans)

    def roots(self, number: int) -> list[Span]:
        return [span for span in self.traces[trace_id(number)] if span.parent_id == CALLER]

    def below(self, root: Span) -> Counter[str]:
        return Counter(span.name for span in self.traces[root.trace_id] if span.parent_id == root.span_id)


def measured(receiver: Receiver) -> int:
    """Return how many requests the metrics have."""
    return sum(point.count for point in receiver.points("gen_ai.server.request.duration"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mini(tmp_path_factory.mktemp("models") / "mini")


@pytest.fixture(scope="module")
def pooled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A server of embeddings."""
    with engine_receiver() as receiver:
        log = tmp_path_factory.mktemp("pooled") / "log"
        options = ["--runner", "pooling", "--dtype", "float32", "--enforce-eager"]
        with serve(model, log, more=options, environment=traced(receiver)) as server:
            name = {"model": "mini"}
            answers = {
                EMBEDDING: server.post("/v1/embeddings", {**name, "input": "a fox"}, parent(EMBEDDING)),
                LIST: server.post("/v1/embeddings", {**name, "input": ["a fox", "two"]}, parent(LIST)),
                POOLING: server.post("/pooling", {**name, "input": "a fox"}, parent(POOLING)),
                SCORES: server.post("/score", {**name, "queries": "fox", "documents": "sea"}, parent(SCORES)),
                RANKS: server.post(
                    "/rerank", {**name, "query": "fox", "documents": ["sea", "dog"]}, parent(RANKS)
                ),
            }
            receiver.wait_for(
                lambda spans: (
                    trace_id(RANKS) in {span.trace_id for span in spans}
                    and measured(receiver) == 1 + 2 + 1 + 2 + 3
                )
            )
    return Run(receiver, answers)


@pytest.fixture(scope="module")
def adapted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A server of two replicas, with an adapter."""
    folder = tmp_path_factory.mktemp("adapted")
    adapter = make_adapter(model, folder / "adapter")
    with engine_receiver() as receiver:
        options = ["--dtype", "float32", "--enforce-eager", "--data-parallel-size", "2"]
        options += ["--enable-lora", "--lora-modules", f"pirate={adapter}"]
        environment = {**traced(receiver), "VLLM_CPU_KVCACHE_SPACE": "1"}
        with serve(model, folder / "log", more=options, environment=environment) as server:
            body = {"prompt": "a fox", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            beams = {"use_beam_search": True, "n": WIDTH, "max_tokens": BEAM_TOKENS}
            answers = {
                BASE: server.post("/v1/completions", {**body, "model": "mini"}, parent(BASE)),
                ADAPTED: server.post("/v1/completions", {**body, "model": "pirate"}, parent(ADAPTED)),
                BEAMS: server.post("/v1/completions", {**body, "model": "mini", **beams}, parent(BEAMS)),
            }
            server.chats([f"number {number}" for number in range(8)], [{}] * 8)
            receiver.wait_for(
                lambda spans: (
                    sum(span.name == "chat mini" for span in spans) == 8 and measured(receiver) == 3 + 8
                )
            )
    return Run(receiver, answers)


@pytest.mark.parametrize(
    ("number", "operation"),
    [
        (EMBEDDING, "embeddings"),
        (POOLING, "embeddings"),
        (LIST, "embeddings"),
        (SCORES, "rerank"),
        (RANKS, "rerank"),
    ],
)
def test_a_request_for_embeddings_is_a_request(pooled: Run, number: int, operation: str) -> None:
    roots = pooled.roots(number)
    prompts = 1 if number in (EMBEDDING, POOLING) else 2 if number in (LIST, SCORES) else 3
    assert len(roots) == prompts
    for root in roots:
        assert not root.is_error
        assert root.attributes["gen_ai.operation.name"] == operation
        assert root.attributes["gen_ai.usage.output_tokens"] == 0
        below = pooled.below(root)
        assert {"queue", "prefill"} <= set(below)
        assert "decode" not in below
    total = sum(root.attributes["gen_ai.usage.input_tokens"] for root in roots)
    assert total == pooled.answers[number]["usage"]["prompt_tokens"]


def test_steps_of_embeddings_are_linked_to_their_requests(pooled: Run) -> None:
    linked = {link for step in pooled.receiver.named("scheduler.step") for link in step.links}
    for number in (EMBEDDING, POOLING, LIST, SCORES, RANKS):
        assert {(root.trace_id, root.span_id) for root in pooled.roots(number)} <= linked
    assert all(step.links for step in pooled.receiver.named("scheduler.step"))


def test_embeddings_are_measured(pooled: Run) -> None:
    points = pooled.receiver.points("gen_ai.server.request.duration")
    counted = {point.attributes["gen_ai.operation.name"]: point.count for point in points}
    assert counted == {"embeddings": 4, "rerank": 5}


def test_an_adapters_request_names_the_adapter_and_its_model(adapted: Run) -> None:
    for number, name in ((BASE, "mini"), (ADAPTED, "pirate")):
        (root,) = adapted.roots(number)
        assert root.name == f"text_completion {name}"
        assert root.attributes["gen_ai.request.model"] == name == adapted.answers[number]["model"]
        assert root.attributes["gen_ai.response.model"] == "mini"
    (adapted_root,) = adapted.roots(ADAPTED)
    link = adapted_root.trace_id, adapted_root.span_id
    steps = [step for step in adapted.receiver.named("scheduler.step") if link in step.links]
    assert {str(step.attributes.get("sgl_aspects.adapters")) for step in steps} == {"['pirate']"}
    points = adapted.receiver.points("gen_ai.server.request.duration")
    assert {point.attributes["gen_ai.request.model"] for point in points} == {"mini", "pirate"}


def test_a_beam_search_is_one_request(adapted: Run) -> None:
    (root,) = adapted.roots(BEAMS)
    usage = adapted.answers[BEAMS]["usage"]
    assert root.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert root.attributes["gen_ai.request.max_tokens"] == BEAM_TOKENS
    below = adapted.below(root)
    assert below["text_completion mini"] >= 1 + WIDTH  # one for each beam and token
    assert root.attributes["gen_ai.usage.output_tokens"] == below["text_completion mini"]
    assert measured(adapted.receiver) == 3 + 8


def test_replicas_have_their_own_names(adapted: Run) -> None:
    ranks = {span.resource.get("sgl_aspects.rank") for span in adapted.receiver.spans}
    assert {"dp0", "dp1"} <= ranks
    assert {"tp0 pp0 dp0", "tp0 pp0 dp1"} <= ranks
    assert orphans(adapted.traces) == []


OFFLINE = """
import asyncio
import sys
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.sampling_params import BeamSearchParams
from vllm.v1.engine.async_llm import AsyncLLM

settings = {"served_model_name": "mini", "dtype": "float32", "max_model_len": 512, "enforce_eager": True}
settings["model"] = sys.argv[1]
four = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0)
two_answers = SamplingParams(max_tokens=4, ignore_eos=True, n=2)

def whole():
    engine = LLM(**settings)
    engine.generate(["one", "and two"], four)
    engine.generate("three", two_answers)
    engine.chat([{"role": "user", "content": "four"}], four)
    beams = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    engine.beam_search([{"prompt": "five"}, {"prompt": "six"}], beams)

async def streams():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))

    async def answer(rid, sampling):
        async for _ in engine.generate(rid, sampling, rid):
            pass

    await asyncio.gather(answer("one", four), answer("two", four), answer("three", two_answers))
    await answer("four", four)
    engine.shutdown()

def vectors():
    engine = LLM(runner="pooling", **settings)
    engine.embed(["one", "and two"])
    engine.score("three", "four")

if __name__ == "__main__":
    WORK
"""


@pytest.mark.parametrize(
    ("work", "processes"),
    [("whole()", "1"), ("whole()", "0"), ("asyncio.run(streams())", "1"), ("vectors()", "1")],
)
def test_an_engine_without_a_server_has_requests(
    model: Path, tmp_path: Path, work: str, processes: str
) -> None:
    script = tmp_path / "offline.py"
    script.write_text(OFFLINE.replace("WORK", work))
    with engine_receiver() as receiver:
        command = [*run_prefix(receiver, level=2), sys.executable, str(script), str(model)]
        settings = {**ENVIRONMENT, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = processes
        output_of(finished(*command, seconds=400, variables=settings))
        receiver.wait_for(lambda spans: any(span.name == "scheduler.step" for span in spans))
    roots = [span for span in receiver.spans if not span.parent_id and span.name.endswith(" mini")]
    tokens = Counter(root.attributes["gen_ai.usage.output_tokens"] for root in roots)
    assert not any(span.is_error for span in receiver.spans)
    if work == "vectors()":
        assert tokens == {0: 4}
        assert Counter(root.name for root in roots) == {"embeddings mini": 2, "rerank mini": 2}
    else:
        is_whole = work == "whole()"
        searches = [root for root in roots if root.attributes["gen_ai.request.id"].startswith("beams-")]
        # Each prompt's beams: one, then two and two.
        beams = [
            (each.attributes["gen_ai.usage.input_tokens"], each.attributes["gen_ai.usage.output_tokens"])
            for each in searches
        ]
        assert beams == [(4 + 3, 10)] * is_whole
        assert tokens - Counter({10: is_whole}) == {4: 3, 8: 1}
        assert Counter(span.name for span in receiver.spans)["decode"] == 5 + 10 * is_whole
        assert sum(root.name == "chat mini" for root in roots) == is_whole
    steps = receiver.named("scheduler.step")
    assert steps
    assert all(step.links for step in steps)


FRONT_END = shutil.which("vllm-rs") or os.environ.get("VLLM_RUST_FRONTEND_PATH", "")


@pytest.mark.skipif(not FRONT_END, reason="no vllm-rs here: it is in the CUDA wheel of the same version")
def test_requests_of_a_front_end_in_rust_are_seen_by_the_engine_core(model: Path, tmp_path: Path) -> None:
    streams, pieces, left = range(16), range(16, 28), range(28, 32)
    with engine_receiver() as receiver:
        environment = {
            **traced(receiver),
            "VLLM_USE_RUST_FRONTEND": "1",
            "VLLM_RUST_FRONTEND_PATH": FRONT_END,
        }
        options = ["--dtype", "float32", "--enforce-eager"]
        with serve(model, tmp_path / "log", more=options, environment=environment) as server:
            server.chat("the first one takes longer")
            callers = [parent(number, **{"x-request-id": f"mine-{number}"}) for number in range(32)]
            chats = server.chats([f"number {n}" for n in streams[:8]], callers[:8])
            chats += (alone := [server.chat(f"number {n}", headers=callers[n]) for n in streams[8:]])
            body = {"model": "mini", "max_tokens": 4, "temperature": 0}
            answers = [
                server.post("/v1/completions", {**body, "prompt": f"{n} a fox"}, callers[n]) for n in pieces
            ]
            long = {"model": "mini", "prompt": "the", "ignore_eos": True, "stream": True, "max_tokens": 900}
            for number in left:
                server.leave("/v1/completions", long, callers[number])
            server.post("/v1/completions", {**body, "prompt": "a", "temperature": -1}, status=400)
            receiver.wait_for(lambda spans: sum(map(is_root, spans)) == 1 + 32)
    roots = {root.attributes["gen_ai.response.id"]: root for root in receiver.spans if is_root(root)}
    traces = by_trace(receiver.spans)
    assert orphans(traces) == []
    streamed = [(roots[answer.rid], answer) for answer in chats]
    assert_whole([root for root, _ in streamed], chats, traces)
    # One at a time: when it received a request is the front end's to say, and in a crowd it says so late.
    assert_first_tokens_as_seen(streamed[-len(alone) :], 5)
    assert {root.name for root, _ in streamed} == {"chat mini"}
    for answer in answers:
        root = roots[answer["id"]]
        assert root.name == "text_completion mini"
        usage = [root.attributes[f"gen_ai.usage.{name}_tokens"] for name in ("input", "output")]
        assert usage == [answer["usage"][f"{name}_tokens"] for name in ("prompt", "completion")]
    problems = {name: root.attributes.get("error.type") for name, root in roots.items()}
    assert {name for name, problem in problems.items() if problem == "abort"} == {
        f"cmpl-mine-{number}" for number in left
    }
    assert not any("gen_ai.request.stream" in root.attributes for root in roots.values())


def is_root(span: Span) -> bool:
    return not span.parent_id and span.name in ("chat mini", "text_completion mini")
