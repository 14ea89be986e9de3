"""Greedy output equals transformers', whatever the batch, the chunks and the pages."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.platforms import set_current_platform
from sgl_aspects.platforms.cpu import CpuPlatform
from sgl_aspects.runtime import Engine, SamplingParams, ServerArgs
from sgl_aspects.runtime.processes.messages import ReadyMessage, TokenizedRequest
from sgl_aspects.runtime.scheduling.batch import Req
from sgl_aspects.runtime.scheduling.scheduler import Scheduler
from tests.support.tiny_models import VARIANTS, greedy, make_llama

NEW_TOKENS = 12
PROMPT_LENGTHS = (1, 2, 5, 16, 17, 40, 63, 100)


class ReferenceCpu(CpuPlatform):
    """Every operator in its reference form."""

    def get_dispatch_key_name(self) -> str:
        return "native"


class PackedCpu(CpuPlatform):
    """Operators in their form for CPUs, where they have one."""

    def get_dispatch_key_name(self) -> str:
        return "cpu"


def prompts_of(vocab_size: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_llama(folder, **VARIANTS[request.param])


@pytest.fixture(params=[ReferenceCpu, PackedCpu])
def _platform(request: pytest.FixtureRequest) -> Iterator[None]:
    set_current_platform(request.param())
    yield
    set_current_platform(None)


def run_in_process(
    args: ServerArgs, prompts: list[list[int]], new_tokens: int, **sampling: Any
) -> tuple[list[list[int]], set[str]]:
    """Drive a Scheduler step by step, a new request every second step. Returns outputs and forward modes."""
    reqs, modes, _ = drive(args, prompts, new_tokens, **sampling)
    return [req.output_ids for req in reqs], modes


def drive(
    args: ServerArgs, prompts: list[list[int]], new_tokens: int, **sampling: Any
) -> tuple[list[Req], set[str], Scheduler]:
    ours, theirs = multiprocessing.Pipe()
    scheduler = Scheduler(args, theirs)
    arriving = [
        TokenizedRequest(
            str(i), prompt, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, **sampling)
        )
        for i, prompt in enumerate(prompts)
    ]
    reqs, modes = [], set()
    schedule = scheduler.schedule

    def watched_schedule() -> Any:
        batch = schedule()
        if batch is not None:
            modes.add(batch.forward_mode.value)
            assert sum(batch.num_new_tokens[batch.num_decodes :]) <= args.chunked_prefill_size
        return batch

    scheduler.schedule = watched_schedule  # type: ignore[method-assign]
    while arriving or scheduler.has_work:
        if arriving and scheduler.step_id % 2 == 0:
            reqs.append(scheduler.add_request(arriving.pop(0)))
        scheduler.step()
        drain(ours)
    assert scheduler.kv_cache.available_size() == scheduler.kv_cache.total_size
    return reqs, modes, scheduler


def drain(connection: Connection) -> None:
    while connection.poll(0):
        assert not isinstance(connection.recv(), ReadyMessage)


@pytest.mark.usefixtures("_platform")
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [7, 512])
def test_continuous_batches_of_every_variant_answer_as_transformers(
    checkpoint: tuple[Path, Any], page_size: int, chunk: int
) -> None:
    folder, model = checkpoint
    prompts = prompts_of(model.config.vocab_size)
    args = ServerArgs(folder, page_size=page_size, chunked_prefill_size=chunk, max_total_tokens=1024)
    outputs, modes = run_in_process(args, prompts, NEW_TOKENS)
    assert outputs == greedy(model, prompts, NEW_TOKENS, ignore_eos=True)
    assert modes == {"extend", "decode", "mixed"}


def test_a_seed_gives_the_same_tokens_however_prompts_are_cut(tmp_path: Path) -> None:
    prompts = prompts_of(make_llama(tmp_path).config.vocab_size)
    outputs = [
        run_in_process(
            ServerArgs(tmp_path, chunked_prefill_size=chunk, max_total_tokens=1024),
            prompts,
            NEW_TOKENS,
            temperature=1.0,
            seed=1,
        )[0]
        for chunk in (7, 33, 512)
    ]
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_small_cache_makes_requests_wait_and_changes_nothing(tmp_path: Path) -> None:
    model = make_llama(tmp_path)
    prompts = prompts_of(model.config.vocab_size)
    args = ServerArgs(tmp_path, page_size=16, max_total_tokens=128, chunked_prefill_size=32)
    outputs, _ = run_in_process(args, prompts, NEW_TOKENS)
    assert outputs == greedy(model, prompts, NEW_TOKENS, ignore_eos=True)


def test_an_engine_with_a_sharded_checkpoint_stops_at_the_end_token(tmp_path: Path) -> None:
    model = make_llama(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    prompts = prompts_of(model.config.vocab_size)
    with Engine(model_path=tmp_path, max_total_tokens=4096, chunked_prefill_size=48) as engine:
        results = engine.generate(prompts, SamplingParams(max_new_tokens=96))
        alone = [engine.generate(prompt, SamplingParams(max_new_tokens=96)) for prompt in prompts]
        stats = engine.stats()
    expected = greedy(model, prompts, 96)
    assert [result.output_ids for result in results] == expected
    assert [result.output_ids for result in alone] == expected
    assert [result.finish_reason for result in results] == [
        "stop" if output[-1] == 2 else "length" for output in expected
    ]
    assert stats["kv_available_tokens"] == stats["kv_total_tokens"]
