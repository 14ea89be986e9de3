"""Causes of a request's latency: disturbances of the embedded engine are found, with their culprits."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import sgl_aspects as aspects
from sgl_aspects.analysis.causes import Cause, Causes, Explanation
from sgl_aspects.analysis.spans import read_spans
from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.tracing import attach
from tests.support.tiny_models import make_llama

pytestmark = pytest.mark.usefixtures("forked_collectors", "forked_schedulers")

#: Seconds of a disturbance: far more than a step of the tiny model takes.
LONG = 1.0
Explain = Callable[[str], Explanation]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_llama(folder, max_position_embeddings=8192)
    return folder


@contextmanager
def traced(folder: Path, model: Path, **fields: Any) -> Iterator[tuple[Engine, list[Explain]]]:
    """An engine under tracing. Afterwards the list has a function that explains a request by its id."""
    file = folder / "spans.jsonl"
    explained: list[Explain] = []
    fields = {"max_total_tokens": 16384, "prefix_cache": False, "chunked_prefill_size": 4096, **fields}
    with (
        attach(level=3, exporters=["otlp-json-file"], file=str(file)),
        Engine(model_path=model, **fields) as engine,
    ):
        engine.generate([5] * 8, answer(4))  # first calls are slow
        yield engine, explained
    causes = Causes(read_spans(file))

    def explain(rid: str) -> Explanation:
        (request,) = causes.find(rid)
        found = causes.explain(request)
        assert sum(found.seconds.values()) == pytest.approx(request.seconds, rel=0.01)
        return found

    explained.append(explain)


def answer(tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, ignore_eos=True)


def first_cause(explanation: Explanation) -> Cause:
    return explanation.ranked()[0][0]


def culprit(explanation: Explanation, cause: Cause) -> str:
    """The span id of the request that has the largest part of a cause."""
    shares = explanation.culprits[cause]
    return max(shares, key=lambda span_id: shares[span_id])


def scheduler_pid() -> int:
    (process,) = multiprocessing.active_children()
    assert process.pid is not None
    return process.pid


def test_the_long_prompt_of_another_request(tmp_path: Path, model: Path) -> None:
    """One request decodes when it comes; another comes right after it, into the queue or the same step."""
    with traced(tmp_path, model, max_running_requests=8) as (engine, explained):
        chunks = iter(engine.submit([7] * 8, answer(12), rid="decoding"))
        next(chunks)
        long = engine.submit([9] * 4000, answer(1), rid="long")
        engine.submit([8] * 8, answer(1), rid="late").result()
        long.result()
        list(chunks)
    explain = explained[0]
    its_id = explain("long").request.span_id
    decoding, late = explain("decoding"), explain("late")
    assert first_cause(decoding) is Cause.OTHERS_PREFILL, decoding.ranked()
    assert culprit(decoding, Cause.OTHERS_PREFILL) == its_id
    assert first_cause(late) in (Cause.QUEUED_PREFILL, Cause.OTHERS_PREFILL), late.ranked()
    assert culprit(late, first_cause(late)) == its_id
    assert first_cause(explain("long")) is Cause.PREFILL


def test_a_batch_that_is_full(tmp_path: Path, model: Path) -> None:
    with traced(tmp_path, model, max_running_requests=1) as (engine, explained):
        chunks = iter(engine.submit([7] * 8, answer(600), rid="running"))
        next(chunks)
        engine.submit([8] * 8, answer(1), rid="waiting").result()
    assert first_cause(explained[0]("waiting")) is Cause.QUEUED_BATCH_FULL


def test_no_room_in_the_kv_cache(tmp_path: Path, model: Path) -> None:
    with traced(tmp_path, model, max_total_tokens=1024, decode_reserve=0) as (engine, explained):
        running = [iter(engine.submit([7] * 64, answer(400), rid=f"running {n}")) for n in range(2)]
        for chunks in running:
            next(chunks)
        engine.submit([8] * 950, answer(1), rid="waiting").result()
    assert first_cause(explained[0]("waiting")) is Cause.QUEUED_KV_ROOM


def test_a_scheduler_that_is_stopped(tmp_path: Path, model: Path) -> None:
    with traced(tmp_path, model) as (engine, explained):
        chunks = iter(engine.submit([7] * 8, answer(400), rid="decoding"))
        next(chunks)
        os.kill(scheduler_pid(), signal.SIGSTOP)
        time.sleep(LONG)
        os.kill(scheduler_pid(), signal.SIGCONT)
        list(chunks)
    found = explained[0]("decoding")
    assert found.seconds[Cause.HOST] > 0.8 * LONG, found.ranked()  # 400 steps may take longer than the stop


def test_a_slow_tokenizer(tmp_path: Path, model: Path) -> None:
    @aspects.around("sgl_aspects.runtime.loader.tokenizer:Tokenizer.encode")
    def slow(original_fn: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(LONG)
        return original_fn(*args, **kwargs)

    with traced(tmp_path, model) as (engine, explained), aspects.woven(slow):
        engine.generate("the quick brown fox", answer(2), rid="slow")
    assert first_cause(explained[0]("slow")) is Cause.TOKENIZE, explained[0]("slow").ranked()


def test_a_preempted_request(tmp_path: Path, model: Path) -> None:
    with traced(tmp_path, model, max_total_tokens=160, decode_reserve=0) as (engine, explained):
        handles = [engine.submit([7 + n] * 32, answer(100), rid=f"r{n}") for n in range(2)]
        for handle in handles:
            handle.result()
    preempted = [explained[0](f"r{n}").seconds[Cause.PREEMPTED] for n in range(2)]
    assert max(preempted) > 0 == min(preempted)
