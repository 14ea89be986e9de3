"""Calls of one engine: text, streams, aborts, sampling, stops, rejections."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.errors import InvalidRequestError
from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.runtime.loader.checkpoint import open_checkpoint
from sgl_aspects.runtime.loader.tokenizer import Tokenizer
from tests.support.answers import clear_model, clear_seed
from tests.support.processes import wait_until
from tests.support.tiny_models import make_tokenizer

pytestmark = pytest.mark.usefixtures("forked_schedulers")

LONG = SamplingParams(max_new_tokens=15000, ignore_eos=True)
PROMPTS = [[5 + i] * (1 + 3 * i) for i in range(8)]


CHAT = "<|start|>user\nein Käsebrot<|end|>\n<|start|>assistant\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder, and transformers' model of it, whose answers to these prompts depend on no rounding."""
    folder = tmp_path_factory.mktemp("llama")
    prompts = [*PROMPTS, [7, 8, 9], [9, 9], make_tokenizer().encode(CHAT).ids]
    return folder, clear_model(folder, prompts, 24, max_position_embeddings=16384)[0]


@pytest.fixture(scope="module")
def folder(checkpoint: tuple[Path, Any]) -> Path:
    return checkpoint[0]


@pytest.fixture(scope="module")
def model(checkpoint: tuple[Path, Any]) -> Any:
    return checkpoint[1]


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return open_checkpoint(str(folder)).load_tokenizer()


@pytest.fixture(scope="module")
def shared_engine(folder: Path) -> Iterator[Engine]:
    with Engine(
        model_path=folder, max_total_tokens=40000, max_running_requests=8, chunked_prefill_size=64
    ) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """Every test must leave it as it was: no request, no page."""
    yield shared_engine
    wait_until(lambda: is_quiet(shared_engine))


def is_quiet(engine: Engine) -> bool:
    stats = engine.stats()
    return (
        stats["running_requests"] == stats["waiting_requests"] == 0
        and stats["kv_available_tokens"] == stats["kv_total_tokens"]
    )


# -- text and streams --------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_chunks_of_a_stream_are_the_whole_text(
    engine: Engine, model: Any, tokenizer: Tokenizer, prompt: list[int]
) -> None:
    # Random weights talk in broken UTF-8: characters over several tokens, and bytes that are not UTF-8.
    settings: dict[str, Any] = {"ignore_eos": True, "temperature": 1.5}
    seed = clear_seed(model, [prompt], 80, **settings)
    params = SamplingParams(max_new_tokens=80, seed=seed, **settings)
    chunks = list(engine.stream(prompt, params))
    whole = engine.generate(prompt, params)
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    assert token_ids == whole.output_ids
    assert "".join(chunk.text for chunk in chunks) == whole.text == tokenizer.decode(token_ids)
    assert [chunk.finish_reason for chunk in chunks[-2:]] == [None, "length"]
    assert len(chunks) == 80


def test_a_result_has_counts_and_times(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    result = engine.generate("the quick brown fox", params, rid="mine")
    assert (result.rid, result.finish_reason, result.completion_tokens) == ("mine", "length", 5)
    assert result.prompt_tokens == len(engine.request_manager.tokenizer.encode("the quick brown fox"))
    assert result.cached_tokens == 0


def test_a_conversation_goes_through_the_chat_template(engine: Engine, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "ein Käsebrot"}]
    assert tokenizer.render_chat(messages) == CHAT
    params = SamplingParams(max_new_tokens=6)
    expected = engine.generate(tokenizer.encode(CHAT), params)
    assert engine.generate(messages, params).output_ids == expected.output_ids
    assert engine.generate([messages, messages], params)[1].output_ids == expected.output_ids
    assert "".join(chunk.text for chunk in engine.stream(messages, params)) == expected.text


# -- ends --------------------------------------------------------------------------------------------


def test_stop_tokens_end_a_request_and_leave_no_text(engine: Engine, tokenizer: Tokenizer) -> None:
    free = engine.generate([7, 8, 9], SamplingParams(max_new_tokens=20, ignore_eos=True)).output_ids
    stop = free[6]
    result = engine.generate(
        [7, 8, 9], SamplingParams(max_new_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    )
    expected = free[: free.index(stop) + 1]
    assert (result.output_ids, result.finish_reason) == (expected, "stop")
    assert result.text == tokenizer.decode(expected[:-1])


def test_the_models_end_token_ends_a_request_unless_ignored(engine: Engine) -> None:
    results = engine.generate(PROMPTS, SamplingParams(max_new_tokens=300, temperature=1.0, seed=1))
    ended = [result for result in results if result.finish_reason == "stop"]
    assert ended
    assert all(result.output_ids[-1] == 2 and 2 not in result.output_ids[:-1] for result in ended)
    more = engine.generate(
        PROMPTS, SamplingParams(max_new_tokens=300, temperature=1.0, seed=1, ignore_eos=True)
    )
    assert {result.completion_tokens for result in more} == {300}


# -- aborts ------------------------------------------------------------------------------------------


def test_a_running_request_can_be_aborted(engine: Engine) -> None:
    handle = engine.submit([5, 6], LONG)
    chunks = iter(handle)
    next(chunks)
    assert handle.abort()
    result = handle.result(timeout=60)
    assert result.finish_reason == "abort"
    assert 0 < result.completion_tokens < 15000
    assert list(chunks)[-1].finish_reason == "abort"
    assert not handle.abort()


def test_a_waiting_request_can_be_aborted_by_its_id(engine: Engine) -> None:
    running = [engine.submit([5, 6], LONG) for _ in range(8)]  # as many as may run at once
    waiting = engine.submit([7], LONG, rid="the ninth")
    wait_until(lambda: engine.stats()["waiting_requests"] == 1)
    assert engine.abort("the ninth")
    result = waiting.result(timeout=60)
    assert (result.finish_reason, result.output_ids, result.text) == ("abort", [], "")
    assert not engine.abort("the ninth")
    for handle in running:
        handle.abort()
        assert handle.result(timeout=60).finish_reason == "abort"


def test_closing_a_stream_early_aborts_its_request(engine: Engine) -> None:
    for chunk in engine.stream([5, 6], LONG):
        assert chunk.token_ids
        break
    wait_until(lambda: is_quiet(engine))
    stream = engine.stream([5, 6], LONG)
    next(stream)
    stream.close()  # type: ignore[attr-defined]  # a generator


def test_a_result_can_be_waited_for_with_a_limit(engine: Engine) -> None:
    handle = engine.submit([5, 6], LONG)
    with pytest.raises(TimeoutError, match=handle.rid):
        handle.result(timeout=0.01)
    assert handle.abort()


# -- sampling ----------------------------------------------------------------------------------------


FREE: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}


def sampled(seed: int | None, **settings: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=24, seed=seed, **FREE, **settings)


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8}, {"top_k": 20}, {"top_k": 50, "top_p": 0.9}])
def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(
    engine: Engine, model: Any, settings: dict[str, Any]
) -> None:
    prompt = [9, 10, 11] * 30  # two chunks alone, and others in a batch
    seed = clear_seed(model, [prompt], 24, **FREE, **settings)
    alone = engine.generate(prompt, sampled(seed, **settings))
    others = [sampled(i) for i in range(7)]
    batch = engine.generate([prompt, *PROMPTS[:7]], [sampled(seed, **settings), *others])
    again = engine.generate([*PROMPTS[:7], prompt], [*others, sampled(seed, **settings)])
    assert alone.output_ids == batch[0].output_ids == again[-1].output_ids
    assert engine.generate(prompt, sampled(seed + 1, **settings)).output_ids != alone.output_ids


def test_without_a_seed_requests_differ(engine: Engine) -> None:
    outputs = {tuple(result.output_ids) for result in engine.generate([[9, 9, 9]] * 4, sampled(None))}
    assert len(outputs) == 4


# -- many callers ------------------------------------------------------------------------------------


def test_threads_share_an_engine(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    expected = {tuple(prompt): engine.generate(prompt, params).output_ids for prompt in PROMPTS}

    def use(i: int) -> bool:
        prompt = PROMPTS[i % len(PROMPTS)]
        if i % 3 == 0:  # some leave early
            next(engine.stream(prompt, LONG))
            return True
        return engine.generate(prompt, params).output_ids == expected[tuple(prompt)]

    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(use, range(96)))


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ("half \ud83d", "surrogate"),
        ([], "empty"),
        ([1, 99999], "99999 is not a token id"),
        ([-1], "-1 is not a token id"),
        ([1, "a"], "'a' is not a token id"),
        (None, "not NoneType"),
        ([5] * 16384, "do not fit the context length of 16384"),
    ],
)
def test_prompts_that_can_never_be_served_are_refused(engine: Engine, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate(prompt)
    with pytest.raises(ValueError, match=message):
        engine.stream(prompt)


def test_a_request_that_the_cache_can_never_hold_is_refused(folder: Path) -> None:
    with Engine(model_path=folder, max_total_tokens=64) as engine:
        with pytest.raises(InvalidRequestError, match="key-value cache of 64 tokens"):
            engine.generate([5] * 10, SamplingParams(max_new_tokens=60))
        fits = engine.generate([5] * 10, SamplingParams(max_new_tokens=54, ignore_eos=True))
        assert fits.completion_tokens == 54


def test_one_bad_prompt_of_a_list_aborts_the_others(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="not a token id"):
        engine.generate([[5], [99999]], LONG)
    wait_until(lambda: is_quiet(engine))


def test_an_id_in_use_is_refused(engine: Engine) -> None:
    handle = engine.submit([5], LONG, rid="twin")
    with pytest.raises(InvalidRequestError, match="'twin' is in use"):
        engine.submit([5], rid="twin")
    handle.abort()
    handle.result(timeout=60)
    assert engine.generate([5], SamplingParams(max_new_tokens=1), rid="twin").rid == "twin"


def test_a_late_end_leaves_the_next_request_of_the_same_id_alone(engine: Engine) -> None:
    first = engine.submit([5], LONG, rid="again")
    first.abort()
    first.result(timeout=60)
    second = engine.submit([5], LONG, rid="again")
    engine.request_manager.end_request(first, "abort")
    assert second.abort()
    assert second.result(timeout=60).finish_reason == "abort"


def test_a_question_that_takes_too_long_is_a_timeout(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine._link, "send", lambda message: None)  # it never gets there
        with pytest.raises(TimeoutError, match=r"did not answer within 0.01 s"):
            engine.stats(timeout=0.01)
    assert engine.stats(timeout=60)["running_requests"] == 0


def test_what_cannot_reach_the_scheduler_is_its_callers_error(engine: Engine) -> None:
    class Local(int):
        """Defined in a function: other processes cannot import it."""

    with pytest.raises((AttributeError, pickle.PicklingError), match="Local"):
        engine.submit([5], SamplingParams(priority=Local(1)), rid="unsent")
    one = SamplingParams(max_new_tokens=1)
    assert engine.generate([5], one, rid="unsent").completion_tokens == 1
    assert engine.generate([Local(5)], one).output_ids == engine.generate([5], one).output_ids


def test_messages_that_the_template_cannot_read_are_refused(engine: Engine) -> None:
    bad: list[Any] = [[{"content": "no role"}], [{}], [{"role": "user", "content": "one"}, "text"]]
    for messages in bad:
        with pytest.raises(InvalidRequestError, match=r'such as {"role": "user", "content": "Hello"}'):
            engine.generate(messages)


def test_settings_for_each_prompt_must_be_as_many(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="each of the 2 prompts"):
        engine.generate([[5], [6]], [SamplingParams()])
