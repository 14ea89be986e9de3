"""Captured decode steps: on the loopback device everywhere, and on CUDA where there is one."""

from __future__ import annotations

import logging
import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback_platform.platform import LoopbackPlatform

from sgl_aspects.errors import ConfigError
from sgl_aspects.platforms import SRTPlatform, set_current_platform
from sgl_aspects.platforms.cpu import CpuPlatform
from sgl_aspects.platforms.cuda import CudaPlatform
from sgl_aspects.runtime import SamplingParams, ServerArgs
from sgl_aspects.runtime.execution.graph_runner import GraphRunner, capture_sizes
from sgl_aspects.runtime.execution.model_runner import ModelRunner
from sgl_aspects.runtime.messages import TokenizedRequest
from sgl_aspects.runtime.scheduling.scheduler import Scheduler
from tests.support.answers import clear_answers, clear_seed, random_prompts
from tests.support.schedulers import run_in_process
from tests.support.tiny_models import FAMILIES, VARIANTS, make_llama, make_model

NEW_TOKENS = 12
ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLATFORMS = [LoopbackPlatform, pytest.param(CudaPlatform, marks=ON_CUDA)]


@pytest.fixture(params=PLATFORMS)
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[SRTPlatform]:
    monkeypatch.delenv("LOOPBACK_VISIBLE_DEVICES", raising=False)
    made = request.param()
    set_current_platform(made)
    yield made
    set_current_platform(None)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(requests, size of the graph) of each replay."""
    found: list[tuple[int, int]] = []
    replay = GraphRunner.replay

    def counted(self: GraphRunner, batch: Any) -> torch.Tensor:
        logits = replay(self, batch)
        size = next(size for size in self.sizes if size >= batch.batch_size)
        found.append((len(logits), size))
        return logits

    monkeypatch.setattr(GraphRunner, "replay", counted)
    return found


def args_for(folder: Path, **fields: Any) -> ServerArgs:
    return ServerArgs(folder, **{"max_total_tokens": 1024, "max_running_requests": 6, **fields})


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("page_size", [1, 16])
def test_replayed_steps_answer_as_transformers(
    variant: str, page_size: int, platform: SRTPlatform, replays: list[tuple[int, int]], tmp_path: Path
) -> None:
    model = make_llama(tmp_path, **VARIANTS[variant])
    prompts, answers = clear_answers(model, NEW_TOKENS)
    outputs, modes = run_in_process(args_for(tmp_path, page_size=page_size), prompts, NEW_TOKENS)
    assert outputs == answers
    assert modes == {"extend", "decode", "mixed"}
    assert {requests for requests, _ in replays} >= {1, 2, 3, 5, 6}
    assert {size for _, size in replays} == {1, 2, 4, 6}


@ON_CUDA
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"deepseek v3.2"}))  # sparse: eager
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_family_is_captured_on_a_gpu(
    family: str, page_size: int, replays: list[tuple[int, int]], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{FAMILIES[family][0]}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    set_current_platform(CudaPlatform())
    model = make_model(tmp_path, family)
    prompts, answers = clear_answers(model, NEW_TOKENS)
    outputs, modes = run_in_process(args_for(tmp_path, page_size=page_size), prompts, NEW_TOKENS)
    count = len(replays)
    eager, _ = run_in_process(
        args_for(tmp_path, page_size=page_size, disable_graphs=True), prompts, NEW_TOKENS
    )
    set_current_platform(None)
    assert modes == {"extend", "decode", "mixed"}
    assert count
    assert len(replays) == count
    assert outputs == eager == answers


def test_graphs_can_be_left_out(
    platform: SRTPlatform, replays: list[tuple[int, int]], tmp_path: Path
) -> None:
    prompts, _ = clear_answers(make_llama(tmp_path), NEW_TOKENS)
    with_graphs, _ = run_in_process(args_for(tmp_path), prompts, NEW_TOKENS)
    count = len(replays)
    assert count
    without, _ = run_in_process(args_for(tmp_path, disable_graphs=True), prompts, NEW_TOKENS)
    assert without == with_graphs
    assert len(replays) == count


@pytest.mark.filterwarnings(
    "ignore:.*script_method:DeprecationWarning", "ignore:TensorFloat32"
)  # torch's own
@pytest.mark.parametrize("backend", ["eager", pytest.param("", marks=pytest.mark.slow)])
def test_compiled_pieces_answer_as_transformers(
    platform: SRTPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    if backend:  # else the platform's own, which takes minutes
        monkeypatch.setattr(platform, "get_compile_backend", lambda mode=None: backend)
    model = make_llama(tmp_path)
    prompts, answers = clear_answers(model, NEW_TOKENS)
    outputs, _ = run_in_process(args_for(tmp_path, compile=True), prompts[2:5], NEW_TOKENS)
    assert outputs == answers[2:5]
    runner = ModelRunner(args_for(tmp_path, compile=True, disable_graphs=True))
    compiled = [module for module in runner.model.modules() if module._compiled_call_impl is not None]
    assert len(compiled) == model.config.num_hidden_layers


def test_a_platform_that_declares_no_pieces_refuses(tmp_path: Path) -> None:
    set_current_platform(CpuPlatform())
    make_llama(tmp_path)
    with pytest.raises(ConfigError, match=r"compile=True.*'cpu'.*no compiler.*get_compile_backend"):
        ModelRunner(args_for(tmp_path, compile=True))
    set_current_platform(None)


# -- a step ahead ---------------------------------------------------------------------------------------


class Driven:
    """A scheduler in this process, and the messages to its owner."""

    def __init__(self, folder: Path, **fields: Any) -> None:
        self.ours, theirs = multiprocessing.Pipe()
        self.scheduler = Scheduler(args_for(folder, **fields), theirs)
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.ahead = 0
        following = self.scheduler._following

        def counted() -> Any:
            batch = following()
            self.ahead += batch is not None
            return batch

        self.scheduler._following = counted  # type: ignore[method-assign]

    def add(self, rid: str, prompt: list[int], **params: Any) -> None:
        settings = {"max_new_tokens": 24, "ignore_eos": True, **params}
        self.scheduler.add_request(TokenizedRequest(rid, prompt, SamplingParams(**settings)))

    def step(self, count: int = 10_000) -> None:
        while count and self.scheduler.has_work:
            count -= 1
            self.scheduler.step()
            while self.ours.poll(0):
                for output in self.ours.recv():
                    assert output.rid not in self.reasons, "output after its end"
                    self.outputs.setdefault(output.rid, []).extend(output.token_ids)
                    if output.finish_reason is not None:
                        self.reasons[output.rid] = output.finish_reason

    def assert_nothing_is_held(self) -> None:
        stats = self.scheduler.stats()
        assert stats["kv_available_tokens"] == stats["kv_total_tokens"]
        assert not self.scheduler.has_work


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9}, {"ignore_eos": False}])
def test_steps_ahead_change_no_token(sampling: dict[str, Any], platform: SRTPlatform, tmp_path: Path) -> None:
    model = make_llama(tmp_path)
    if "temperature" in sampling:
        prompts = random_prompts(random.Random(3))
        sampling = {**sampling, "seed": clear_seed(model, prompts, 24, **sampling)}
    else:
        prompts, _ = clear_answers(model, 24)
    found = []
    for disable in (False, True):
        driven = Driven(tmp_path, disable_overlap=disable)
        for number, prompt in enumerate(prompts):
            driven.add(str(number), prompt, **sampling)
            driven.step(3)
        driven.step()
        driven.assert_nothing_is_held()
        assert (driven.ahead > 10) is not disable
        found.append((driven.outputs, driven.reasons))
    assert found[0] == found[1]
    assert len(found[0][0]) == len(prompts)


def test_an_end_token_is_the_end_though_a_step_more_is_under_way(
    platform: SRTPlatform, tmp_path: Path
) -> None:
    model = make_llama(tmp_path)
    prompts, plain = clear_answers(model, 24)
    driven = Driven(tmp_path)
    stops = [tokens[9] for tokens in plain]  # each ends at its tenth token, or where that one comes before
    for number, (prompt, stop) in enumerate(zip(prompts[:6], stops)):
        driven.add(str(number), prompt, stop_token_ids=[stop])
    driven.step()
    driven.assert_nothing_is_held()
    assert driven.ahead
    for number, stop in enumerate(stops[:6]):
        tokens = plain[number]
        assert driven.outputs[str(number)] == tokens[: tokens.index(stop) + 1]
        assert driven.reasons[str(number)] == "stop"


def test_an_abort_while_a_step_is_in_flight(platform: SRTPlatform, tmp_path: Path) -> None:
    model = make_llama(tmp_path)
    prompts, plain = clear_answers(model, 24)
    driven = Driven(tmp_path)
    for number, prompt in enumerate(prompts[:3]):
        driven.add(str(number), prompt)
    driven.step(6)
    assert driven.scheduler.in_flight is not None
    driven.scheduler.abort_request("1")
    driven.step()
    driven.assert_nothing_is_held()
    assert driven.outputs["0"] == plain[0]
    assert driven.outputs["2"] == plain[2]
    assert driven.reasons == {"0": "length", "1": "abort", "2": "length"}
    assert driven.outputs["1"] == plain[1][: len(driven.outputs["1"])]


def test_requests_that_need_their_tokens_first_are_not_run_ahead(
    platform: SRTPlatform, tmp_path: Path
) -> None:
    make_llama(tmp_path)
    prompt = random_prompts(random.Random(3))[3]
    driven = Driven(tmp_path)
    driven.add("0", prompt, repetition_penalty=1.3)
    driven.step()
    driven.add("1", prompt, logprobs=2)
    driven.step()
    assert driven.ahead == 0


def test_a_small_cache_is_enough(platform: SRTPlatform, tmp_path: Path) -> None:
    model = make_llama(tmp_path)
    prompts, plain = clear_answers(model, 24)
    driven = Driven(tmp_path, max_total_tokens=160, page_size=4, decode_reserve=4)
    for number, prompt in enumerate(prompts):
        driven.add(str(number), prompt)
    driven.step()
    driven.assert_nothing_is_held()
    assert driven.scheduler.num_retractions
    assert driven.ahead
    assert [driven.outputs[str(number)] for number in range(len(prompts))] == plain


# -- when it is captured, and whether -------------------------------------------------------------------


def test_new_weights_are_captured_anew(platform: SRTPlatform, tmp_path: Path) -> None:
    make_llama(tmp_path)
    runner = ModelRunner(args_for(tmp_path))
    before = dict(runner.graph_runner._captured)
    runner.weights_changed()
    after = runner.graph_runner._captured
    assert after.keys() == before.keys() == {1, 2, 4, 6}
    assert all(after[size][0] is not before[size][0] for size in after)
    runner.graph_runner._platform = runner.platform = KeepsGraphs()
    runner.weights_changed()
    assert runner.graph_runner._captured is after


class KeepsGraphs(CpuPlatform):
    def needs_graph_recapture(self) -> bool:
        return False


def test_a_backend_that_cannot_be_captured_runs_eagerly_with_a_log_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    set_current_platform(LoopbackPlatform())
    make_llama(tmp_path)
    with caplog.at_level(logging.WARNING):
        runner = ModelRunner(args_for(tmp_path, attention_backend="torch_native"))
    set_current_platform(None)
    assert runner.graph_runner is None
    assert "no loopback graph: TorchNativeBackend cannot be captured" in caplog.text


def test_a_platform_without_graphs_has_no_runner(tmp_path: Path) -> None:
    set_current_platform(CpuPlatform())
    make_llama(tmp_path)
    assert ModelRunner(args_for(tmp_path)).graph_runner is None
    set_current_platform(None)


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (100, [1, 2, 4, *range(8, 65, 8), 96, 100]),
    ],
)
def test_sizes(largest: int, sizes: list[int]) -> None:
    assert capture_sizes(largest) == sizes
