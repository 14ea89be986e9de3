"""Each family of models answers as transformers does, whatever happens to its requests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.platforms import set_current_platform
from sgl_aspects.platforms.cpu import CpuPlatform
from sgl_aspects.runtime import ServerArgs
from tests.support.answers import MARGIN, clear_answers, margin, random_prompts
from tests.support.schedulers import NEW_TOKENS, drive, run_in_process
from tests.support.tiny_models import FAMILIES, VARIANTS, make_llama, make_model


def alike(draw: random.Random) -> list[list[int]]:
    first, *_, long = random_prompts(draw)
    return [long, long, [*long, 7, 8, 9], long[:50], [*long[:37], *first, 5, 6], first]


def pairs(draw: random.Random) -> list[list[int]]:
    """Pairs that differ in their last token."""
    return [[*prompt, i + 7] for i, prompt in enumerate(random_prompts(draw)[2:6] * 2)]


PAGE_SIZES = [pytest.param(1, marks=pytest.mark.slow), 16]


@pytest.fixture(scope="module", params=sorted(FAMILIES.keys() - {"llama"}))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, make_model(folder, request.param)


def answers_as_transformers(folder: Path, model: Any, page_size: int, chunk: int) -> None:
    prompts, answers = clear_answers(model, NEW_TOKENS)
    args = ServerArgs(folder, page_size=page_size, chunked_prefill_size=chunk, max_total_tokens=1024)
    outputs, modes = run_in_process(args, prompts, NEW_TOKENS)
    assert outputs == answers
    assert modes == {"extend", "decode", "mixed"}


@pytest.mark.parametrize("sizes", [(1, 7), (16, 512)])
def test_continuous_batches_of_every_family_answer_as_transformers(
    checkpoint: tuple[Path, Any], sizes: tuple[int, int]
) -> None:
    answers_as_transformers(*checkpoint, *sizes)


class ReferenceCpu(CpuPlatform):
    """Every operator in its reference form."""

    def get_dispatch_key_name(self) -> str:
        return "native"


class PackedCpu(CpuPlatform):
    """Operators in their form for CPUs, where they have one."""

    def get_dispatch_key_name(self) -> str:
        return "cpu"


@pytest.mark.parametrize("platform", [ReferenceCpu, PackedCpu])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_of_llama_does_with_each_form_of_the_operators(
    variant: str, platform: type[CpuPlatform], tmp_path: Path
) -> None:
    model = make_llama(tmp_path, **VARIANTS[variant])
    set_current_platform(platform())
    try:
        for sizes in ((1, 7), (16, 512)):
            answers_as_transformers(tmp_path, model, *sizes)
    finally:
        set_current_platform(None)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prompts_that_begin_alike_are_computed_once_and_answered_as_ever(
    checkpoint: tuple[Path, Any], page_size: int
) -> None:
    folder, model = checkpoint
    prompts, answers = clear_answers(model, NEW_TOKENS, alike)
    args = ServerArgs(folder, page_size=page_size, chunked_prefill_size=64, max_total_tokens=1024)
    reqs, _, _ = drive(args, prompts, NEW_TOKENS)
    assert [req.output_ids for req in reqs] == answers
    shared = [0, 99, 100, 49, 37, 0] if page_size == 1 else [0, 96, 96, 48, 32, 0]
    assert [req.cached_tokens for req in reqs] == shared


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_requests_that_have_to_give_way_lose_nothing(checkpoint: tuple[Path, Any], page_size: int) -> None:
    folder, model = checkpoint
    prompts, answers = clear_answers(model, 24, pairs)
    args = ServerArgs(
        folder, page_size=page_size, max_total_tokens=112, chunked_prefill_size=32, decode_reserve=0
    )
    reqs, _, scheduler = drive(args, prompts, 24)
    assert scheduler.num_retractions > 0
    assert [req.output_ids for req in reqs] == answers


def test_prompts_with_a_near_tie_are_not_compared(tmp_path: Path) -> None:
    model = make_llama(tmp_path)
    (prompt, *_), (answer, *_) = clear_answers(model, 4)
    assert margin(model, prompt, answer) > MARGIN
    rows = model.lm_head.weight.data
    rows[3] = rows[answer[0]] * (1 + 1e-6)
    assert margin(model, prompt, answer) < MARGIN
    assert margin(model, prompt, [answer[0] + 1, *answer[1:]]) == 0
