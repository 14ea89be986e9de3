"""New weights for an engine that serves: no answer mixes two models; bad weights change nothing."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_aspects.errors import ModelLoadError
from sgl_aspects.runtime import Engine, SamplingParams, ServerArgs
from sgl_aspects.runtime.execution.model_runner import ModelRunner
from tests.support.answers import clear_model
from tests.support.http_server import serving
from tests.support.threads import in_threads
from tests.support.tiny_models import make_tokenizer

NEW = 24
PROMPTS = [[5 + i] * (1 + 7 * i) for i in range(8)]
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
pytestmark = pytest.mark.usefixtures("forked_schedulers")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def models(folders: tuple[Path, Path]) -> list[tuple[Any, list[list[int]]]]:
    """Two models, and the answers of each."""
    seeds = zip(folders, (0, 1000))
    return [clear_model(folder, PROMPTS, NEW, family="qwen3", seed=seed) for folder, seed in seeds]


@pytest.fixture(scope="module")
def answers(models: list[tuple[Any, list[list[int]]]]) -> list[list[list[int]]]:
    """The answers of each of the two models."""
    return [answers for _, answers in models]


@pytest.fixture(scope="module")
def shared_engine(folders: tuple[Path, Path], answers: object) -> Iterator[Engine]:
    with Engine(model_path=folders[0], max_total_tokens=300, chunked_prefill_size=16) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine, folders: tuple[Path, Path]) -> Iterator[Engine]:
    """It has the weights of the first model, and no prefixes."""
    shared_engine.update_weights(folders[0])
    yield shared_engine
    stats = shared_engine.stats()
    assert stats["kv_available_tokens"] == stats["kv_total_tokens"]


def outputs(engine: Engine) -> list[list[int]]:
    return [result.output_ids for result in engine.generate(PROMPTS, PARAMS)]


def test_the_old_weights_are_freed_at_once(folders: tuple[Path, Path], answers: object) -> None:
    runner = ModelRunner(ServerArgs(model_path=folders[0], max_total_tokens=64))
    old = weakref.ref(runner.model.lm_head)
    gc.disable()
    try:
        runner.update_weights(str(folders[1]))
        assert old() is None
    finally:
        gc.enable()


def test_under_load_each_answer_is_of_one_model_whole(
    engine: Engine, folders: tuple[Path, Path], answers: list[list[list[int]]]
) -> None:
    done, seen, faults = threading.Event(), set(), []

    def ask(i: int) -> None:
        while not done.is_set():
            output = engine.generate(PROMPTS[i], PARAMS).output_ids
            if output in (answers[0][i], answers[1][i]):
                seen.add(output == answers[1][i])
            else:
                faults.append((i, output))

    with in_threads(*(partial(ask, i) for i in range(8))):
        try:
            for model in (1, 0) * 3:
                engine.update_weights(folders[model])
                assert engine.generate(PROMPTS[3], PARAMS).output_ids == answers[model][3]
        finally:
            done.set()
    assert not faults
    assert seen == {True, False}


def test_prefixes_of_the_old_weights_are_forgotten(
    engine: Engine, folders: tuple[Path, Path], answers: list[list[list[int]]]
) -> None:
    assert outputs(engine) == answers[0]
    assert engine.generate(PROMPTS[7], PARAMS).cached_tokens > 0
    engine.update_weights(folders[1])
    assert engine.stats()["kv_cached_tokens"] == 0
    again = engine.generate(PROMPTS[7], PARAMS)
    assert (again.cached_tokens, again.output_ids) == (0, answers[1][7])


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to, dirs_exist_ok=True))


def test_weights_that_cannot_be_loaded_leave_the_old_ones(
    engine: Engine, folders: tuple[Path, Path], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    lacking = copy_of(folders[1], tmp_path / "lacking")
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, lacking / "model.safetensors")
    misshaped = copy_of(folders[1], tmp_path / "misshaped")
    tensors = load_file(misshaped / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(7, 64)
    save_file(tensors, misshaped / "model.safetensors")
    cut = copy_of(folders[1], tmp_path / "cut")
    content = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(content[: len(content) // 2])
    other = copy_of(folders[1], tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5, "hidden_size": 32}))

    for folder, message in [
        (tmp_path / "nothing", "does not exist"),
        (lacking, r"lacks model\.layers\.2\.mlp\.down_proj\.weight"),
        (misshaped, r"'lm_head\.weight' has shape \[7, 64\]"),
        (cut, "cannot be read"),
        (other, r"differs in hidden_size \(32 instead of 64\), rms_norm_eps"),
    ]:
        with pytest.raises(ModelLoadError, match=message) as caught:
            engine.update_weights(folder)
        assert "the old weights stay" in str(caught.value)
        assert outputs(engine) == answers[0]


def test_the_checkpoint_may_be_in_several_files(
    engine: Engine, models: list[tuple[Any, list[list[int]]]], tmp_path: Path
) -> None:
    model, answers = models[1]
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    engine.update_weights(tmp_path)
    assert outputs(engine) == answers


def test_an_update_waits_for_the_requests_that_have_begun(
    engine: Engine, folders: tuple[Path, Path], answers: list[list[list[int]]]
) -> None:
    long, most_steps = SamplingParams(max_new_tokens=200, ignore_eos=True), engine.stats()["steps"] + 20
    stream = engine.stream(PROMPTS[1], long)
    tokens = list(next(stream).token_ids)
    updating = threading.Thread(target=engine.update_weights, args=(folders[1],))
    updating.start()
    while (stats := engine.stats())["running_requests"] and stats["steps"] < most_steps:
        pass
    later = engine.generate(PROMPTS[2], PARAMS)  # waits, and is of the new weights
    updating.join()
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert len(tokens) == 200
    assert tokens[:NEW] == answers[0][1]
    assert later.output_ids == answers[1][2]


def test_over_http_new_weights_come_or_the_reason_why_not(
    folders: tuple[Path, Path], answers: list[list[list[int]]], tmp_path: Path
) -> None:
    def ask() -> Any:
        body = {"model": folders[0].name, "prompt": PROMPTS[2], "max_tokens": NEW, "temperature": 0}
        body |= {"ignore_eos": True, "priority": 3}
        status, answer = server.request("POST", "/v1/completions", body)
        assert status == 200
        return answer["choices"][0]["text"]

    def update(path: Path) -> tuple[int, Any]:
        return server.request("POST", "/update_weights_from_disk", {"model_path": str(path)})

    tokenizer = make_tokenizer()
    with serving(folders[0], tmp_path / "log", "--max-total-tokens", "300", "--admin", forks=True) as server:
        assert ask() == tokenizer.decode(answers[0][2])
        assert update(folders[1]) == (200, {"model_path": str(folders[1])})
        assert ask() == tokenizer.decode(answers[1][2])
        status, answer = update(tmp_path / "nothing")
        assert (status, answer["error"]["param"]) == (400, "model_path")
        assert "the old weights stay" in answer["error"]["message"]
        assert server.request("POST", "/update_weights_from_disk", {})[0] == 400
        assert ask() == tokenizer.decode(answers[1][2])
        assert server.is_quiet()
