"""Greedy output equals transformers', whatever the batch, the chunks and the pages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.platforms import set_current_platform
from sgl_aspects.platforms.cpu import CpuPlatform
from sgl_aspects.runtime import Engine, SamplingParams, ServerArgs
from tests.support.answers import MARGIN, clear_answers, clear_seed, margin, random_prompts
from tests.support.schedulers import NEW_TOKENS, run_in_process
from tests.support.tiny_models import VARIANTS, make_llama

pytestmark = pytest.mark.usefixtures("forked_schedulers")


class ReferenceCpu(CpuPlatform):
    """Every operator in its reference form."""

    def get_dispatch_key_name(self) -> str:
        return "native"


class PackedCpu(CpuPlatform):
    """Operators in their form for CPUs, where they have one."""

    def get_dispatch_key_name(self) -> str:
        return "cpu"


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_llama(folder, **VARIANTS[request.param])


@pytest.fixture(params=[ReferenceCpu, PackedCpu])
def _platform(request: pytest.FixtureRequest) -> Iterator[None]:
    set_current_platform(request.param())
    yield
    set_current_platform(None)


@pytest.mark.usefixtures("_platform")
@pytest.mark.parametrize(
    ("page_size", "chunk"),
    [(1, 7), (16, 512), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 512), (16, 7)))],
)
def test_continuous_batches_of_every_variant_answer_as_transformers(
    checkpoint: tuple[Path, Any], page_size: int, chunk: int
) -> None:
    folder, model = checkpoint
    prompts, answers = clear_answers(model, NEW_TOKENS)
    args = ServerArgs(folder, page_size=page_size, chunked_prefill_size=chunk, max_total_tokens=1024)
    outputs, modes = run_in_process(args, prompts, NEW_TOKENS)
    assert outputs == answers
    assert modes == {"extend", "decode", "mixed"}


def test_prompts_with_a_near_tie_are_not_compared(tmp_path: Path) -> None:
    model = make_llama(tmp_path)
    (prompt, *_), (answer, *_) = clear_answers(model, 4)
    assert margin(model, prompt, answer) > MARGIN
    rows = model.lm_head.weight.data
    rows[3] = rows[answer[0]] * (1 + 1e-6)
    assert margin(model, prompt, answer) < MARGIN
    assert margin(model, prompt, [answer[0] + 1, *answer[1:]]) == 0


def test_a_seed_gives_the_same_tokens_however_prompts_are_cut(tmp_path: Path) -> None:
    prompts = random_prompts(random.Random(3))
    seed = clear_seed(make_llama(tmp_path), prompts, NEW_TOKENS, temperature=1.0)
    outputs = [
        run_in_process(
            ServerArgs(tmp_path, chunked_prefill_size=chunk, max_total_tokens=1024),
            prompts,
            NEW_TOKENS,
            temperature=1.0,
            seed=seed,
        )[0]
        for chunk in (7, 33, 512)
    ]
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_small_cache_makes_requests_wait_and_changes_nothing(tmp_path: Path) -> None:
    model = make_llama(tmp_path)
    prompts, answers = clear_answers(model, NEW_TOKENS)
    args = ServerArgs(tmp_path, page_size=16, max_total_tokens=128, chunked_prefill_size=32)
    outputs, _ = run_in_process(args, prompts, NEW_TOKENS)
    assert outputs == answers


def test_an_engine_with_a_sharded_checkpoint_stops_at_the_end_token(tmp_path: Path) -> None:
    model = make_llama(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    prompts, expected = clear_answers(model, 96, ignore_eos=False)
    with Engine(model_path=tmp_path, max_total_tokens=4096, chunked_prefill_size=48) as engine:
        results = engine.generate(prompts, SamplingParams(max_new_tokens=96))
        alone = [engine.generate(prompt, SamplingParams(max_new_tokens=96)) for prompt in prompts]
        stats = engine.stats()
    assert [result.output_ids for result in results] == expected
    assert [result.output_ids for result in alone] == expected
    assert [result.finish_reason for result in results] == [
        "stop" if output[-1] == 2 else "length" for output in expected
    ]
    assert stats["kv_available_tokens"] == stats["kv_total_tokens"]
