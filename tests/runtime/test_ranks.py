"""Tensor parallelism: two processes answer as one, and the end of one is the end of the engine."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.errors import ConfigError, ModelLoadError, SchedulerDiedError
from sgl_aspects.runtime import Engine, SamplingParams
from tests.support.answers import clear_answers, clear_answers_of, clear_seed
from tests.support.processes import wait_until_gone
from tests.support.tiny_models import FAMILIES, make_model

pytestmark = pytest.mark.usefixtures("forked_schedulers", "two_devices")

PARAMS = SamplingParams(max_new_tokens=16, ignore_eos=True)
LONG = SamplingParams(max_new_tokens=400, ignore_eos=True)


def outputs(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [result.output_ids for result in engine.generate(prompts, PARAMS)]


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name == "llama" else [pytest.mark.slow]) for name in sorted(FAMILIES)],
)
def test_two_ranks_answer_as_transformers(tmp_path: Path, family: str) -> None:
    model = make_model(tmp_path, family)
    prompts, expected = clear_answers(model, 16)
    seed = clear_seed(model, [prompts[3]], 8, temperature=1.0)
    page_size = 1 if family == "llama" else 16
    with Engine(
        model_path=tmp_path,
        tp_size=2,
        page_size=page_size,
        chunked_prefill_size=32,
        max_total_tokens=256,
        decode_reserve=0,
    ) as engine:
        assert len(set(engine.scheduler_pids)) == 2
        assert outputs(engine, prompts) == expected
        assert outputs(engine, prompts) == expected  # with prefixes, and some retracted
        sampled = SamplingParams(max_new_tokens=8, temperature=1.0, seed=seed)
        first, again = (engine.generate(prompts[3], sampled).output_ids for _ in range(2))
        assert first == again
        stats = engine.stats()
        assert stats["kv_available_tokens"] == stats["kv_total_tokens"]
        pids = engine.scheduler_pids
    for pid in pids:
        wait_until_gone(pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [{"num_key_value_heads": 1}, {"tie_word_embeddings": True}, {"vocab_size": 321}]
)
def test_what_cannot_be_cut_is_copied(tmp_path: Path, overrides: dict[str, Any]) -> None:
    model = make_model(tmp_path, "llama", attention_bias=True, mlp_bias=True, **overrides)
    prompts, answers = clear_answers(model, 16)
    with Engine(model_path=tmp_path, tp_size=2, max_total_tokens=512) as engine:
        assert outputs(engine, prompts) == answers


@pytest.mark.parametrize(
    ("rank", "busy"),
    [
        (1, True),
        pytest.param(0, True, marks=pytest.mark.slow),
        pytest.param(1, False, marks=pytest.mark.slow),
    ],
)
def test_one_rank_that_is_killed_ends_the_engine(tmp_path: Path, rank: int, busy: bool) -> None:
    make_model(tmp_path, "llama")
    engine = Engine(model_path=tmp_path, tp_size=2, max_total_tokens=1024)
    handle = engine.submit([5, 6], LONG)
    if busy:
        next(iter_chunks := iter(handle))
    else:
        handle.abort()
        handle.result(20)
    pids = engine.scheduler_pids
    os.kill(pids[rank], signal.SIGKILL)
    start = time.monotonic()

    def use_up() -> None:
        if busy:
            list(iter_chunks)
        while time.monotonic() < start + 20:
            engine.generate([5], PARAMS)

    with pytest.raises(SchedulerDiedError, match=f"rank {rank} was killed by signal 9, SIGKILL.*Start a new"):
        use_up()
    for pid in pids:
        wait_until_gone(pid)
    engine.shutdown()


@pytest.mark.slow
def test_new_weights_reach_all_ranks_or_none(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    models = [make_model(folder, "qwen2", seed=i) for i, folder in enumerate(folders)]
    prompts, expected = clear_answers_of(models, 16)
    with Engine(model_path=folders[0], tp_size=2, max_total_tokens=1024) as engine:
        assert outputs(engine, prompts) == expected[0]
        engine.update_weights(folders[1])
        assert outputs(engine, prompts) == expected[1]
        with pytest.raises(ModelLoadError, match="does not exist"):
            engine.update_weights(tmp_path / "three")
        assert outputs(engine, prompts) == expected[1]


def test_a_model_that_cannot_be_cut_is_refused_before_processes_start(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=48)
    with pytest.raises(ConfigError, match=r"tp_size=99 does not divide the attention heads \(3\)"):
        Engine(model_path=tmp_path, tp_size=99, max_total_tokens=1024, startup_timeout=1)
