"""Captured decode steps: on the loopback device everywhere, and on CUDA where there is one."""

from __future__ import annotations

import logging
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
from sgl_aspects.runtime import ServerArgs
from sgl_aspects.runtime.graph_runner import GraphRunner, capture_sizes
from sgl_aspects.runtime.model_runner import ModelRunner
from tests.test_runtime_equality import prompts_of, run_in_process
from tests.tiny_models import VARIANTS, greedy, make_llama

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
    variant: str,
    page_size: int,
    platform: SRTPlatform,
    replays: list[tuple[int, int]],
    tmp_path: Path,
) -> None:
    model = make_llama(tmp_path, **VARIANTS[variant])
    prompts = prompts_of(model.config.vocab_size)
    outputs, modes = run_in_process(args_for(tmp_path, page_size=page_size), prompts, NEW_TOKENS)
    assert outputs == greedy(model, prompts, NEW_TOKENS, ignore_eos=True)
    assert modes == {"extend", "decode", "mixed"}
    assert {requests for requests, _ in replays} >= {1, 2, 3, 5, 6}
    assert {size for _, size in replays} == {1, 2, 4, 6}


def test_graphs_can_be_left_out(
    platform: SRTPlatform, replays: list[tuple[int, int]], tmp_path: Path
) -> None:
    prompts = prompts_of(make_llama(tmp_path).config.vocab_size)
    with_graphs, _ = run_in_process(args_for(tmp_path), prompts, NEW_TOKENS)
    count = len(replays)
    assert count
    without, _ = run_in_process(args_for(tmp_path, disable_graphs=True), prompts, NEW_TOKENS)
    assert without == with_graphs
    assert len(replays) == count


def test_compiled_pieces_answer_as_transformers(platform: SRTPlatform, tmp_path: Path) -> None:
    model = make_llama(tmp_path)
    prompts = prompts_of(model.config.vocab_size)
    outputs, _ = run_in_process(args_for(tmp_path, compile=True), prompts, NEW_TOKENS)
    assert outputs == greedy(model, prompts, NEW_TOKENS, ignore_eos=True)
    runner = ModelRunner(args_for(tmp_path, compile=True, disable_graphs=True))
    compiled = [module for module in runner.model.modules() if module._compiled_call_impl is not None]
    assert len(compiled) == model.config.num_hidden_layers


def test_a_platform_that_declares_no_pieces_refuses(tmp_path: Path) -> None:
    set_current_platform(CpuPlatform())
    make_llama(tmp_path)
    with pytest.raises(ConfigError, match=r"compile=True.*'cpu'.*piecewise_graph"):
        ModelRunner(args_for(tmp_path, compile=True))
    set_current_platform(None)


def test_new_weights_are_captured_anew(platform: SRTPlatform, tmp_path: Path) -> None:
    make_llama(tmp_path)
    runner = ModelRunner(args_for(tmp_path))
    before = dict(runner.graph_runner._captured)
    runner.weights_changed()
    after = runner.graph_runner._captured
    assert after.keys() == before.keys() == {1, 2, 4, 6}
    assert all(after[size].graph is not before[size].graph for size in after)
    runner.graph_runner._platform = runner.platform = KeepsGraphs()
    runner.weights_changed()
    assert runner.graph_runner._captured is after


class KeepsGraphs(CpuPlatform):
    def needs_graph_recapture(self) -> bool:
        return False


def test_a_backend_that_cannot_be_captured_runs_eagerly_and_says_so(
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
