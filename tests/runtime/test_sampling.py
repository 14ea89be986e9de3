"""How tokens are chosen: against transformers' own processors, and what callers of an engine see of it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers

from sgl_aspects.errors import InvalidRequestError
from sgl_aspects.runtime import Engine, SamplingParams
from sgl_aspects.runtime.core import Req
from sgl_aspects.runtime.messages import TokenLogprobs
from sgl_aspects.runtime.sampling.logit_adjuster import LogitAdjuster
from sgl_aspects.runtime.sampling.sampler import Sampler
from tests.support.answers import MARGIN, clear_model, clear_seed

pytestmark = pytest.mark.usefixtures("forked_schedulers")

EOS = 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("llama")
    return folder, clear_model(folder, [[5], [7]], 40, max_position_embeddings=2048)[0]


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[Engine]:
    with Engine(model_path=model[0], max_total_tokens=8192, max_running_requests=8) as engine:
        yield engine


def make_req(params: SamplingParams, prompt: list[int], output: list[int], row: int = 0) -> Req:
    req = Req("r", prompt, params, random.Random(0), output_ids=output)
    req.row = row
    return req


def random_logits(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3


# -- against transformers ----------------------------------------------------------------------------


def processed_by_transformers(logits: torch.Tensor, params: SamplingParams, req: Req) -> torch.Tensor:
    """transformers' result for one row [1, vocab], for the settings that it has."""
    ids = torch.tensor([req.input_ids + req.output_ids])
    steps: list[Any] = []
    if params.repetition_penalty != 1.0:
        steps.append(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_new_tokens:
        steps.append(
            transformers.MinNewTokensLengthLogitsProcessor(len(req.input_ids), params.min_new_tokens, EOS)
        )
    steps.append(transformers.TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k is not None:
        steps.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(transformers.MinPLogitsWarper(params.min_p))
    for step in steps:
        logits = step(ids, logits)
    return logits.double().softmax(dim=-1)[0]


@pytest.mark.parametrize("vocab", [60, 2500])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"top_k": 5},
        {"top_k": 10**6},
        {"top_p": 0.6},
        {"top_p": 0.999},
        {"top_k": 7, "top_p": 0.7},
        {"top_k": 1500, "top_p": 0.95, "temperature": 1.3},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"min_p": 0.001, "temperature": 3.0},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "top_p": 0.8},
        {"min_new_tokens": 5, "top_k": 20},
        {"repetition_penalty": 1.2, "temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    ],
)
def test_tokens_are_as_likely_as_in_transformers(vocab: int, fields: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 1.0, **fields})
    req = make_req(params, [5, 6, 7, 5], [9, 9, 11])
    logits = random_logits(1, vocab)
    logits[0, EOS] = 8.0  # likely, so that forbidding it shows
    expected = processed_by_transformers(logits.clone(), params, req)
    adjusted = LogitAdjuster(1, vocab, [EOS], CPU)(logits, [req], [True])
    draws = 4000
    uniforms = [(i + 0.5) / draws for i in range(draws)]
    tokens = Sampler()(adjusted.expand(draws, vocab), [params] * draws, uniforms)
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert (counts - expected * draws).abs().max() <= 1.01
    assert not counts[expected == 0].any()


def test_penalties_of_the_output_and_biases_follow_their_definition() -> None:
    vocab, adjuster = 40, LogitAdjuster(3, 40, [EOS], CPU)
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=1.25, logit_bias={3: 7.0, 9: -100})
    req = make_req(params, [5, 6], [9, 9, 3], row=1)
    logits = random_logits(1, vocab)
    expected = logits.clone()
    expected[0, 9] += -0.5 * 2 - 1.25 - 100
    expected[0, 3] += -0.5 - 1.25 + 7.0
    assert torch.allclose(adjuster(logits, [req], [True]), expected)
    req.output_ids.append(6)  # counted on from where it was; the prompt's 6 was not output
    expected[0, 6] -= 0.5 + 1.25
    assert torch.allclose(adjuster(logits, [req], [True]), expected)
    # Another request in the same row starts afresh.
    other = make_req(SamplingParams(presence_penalty=1.0), [1], [4], row=1)
    expected = logits.clone()
    expected[0, 4] -= 1.0
    assert torch.allclose(adjuster(logits, [other], [True]), expected)


def test_rows_without_settings_are_unchanged() -> None:
    vocab, adjuster = 30, LogitAdjuster(4, 30, [EOS], CPU)
    logits = random_logits(3, vocab)
    plain = [make_req(SamplingParams(), [5], [6], row=i) for i in range(3)]
    assert adjuster(logits, plain, [True] * 3) is logits
    strict = make_req(SamplingParams(repetition_penalty=2.0, min_new_tokens=3), [5], [6], row=3)
    assert adjuster(logits, [plain[0], strict, plain[1]], [True, False, True]) is logits
    adjusted = adjuster(logits, [plain[0], strict, plain[1]], [True] * 3)
    assert torch.equal(adjusted[[0, 2]], logits[[0, 2]])
    assert adjusted[1, EOS] == float("-inf")


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_nan_logits_give_a_token_that_exists(fields: dict[str, Any]) -> None:
    logits = torch.full((1, 30), float("nan"))
    params = SamplingParams(**{"temperature": 1.0, **fields})
    assert 0 <= Sampler()(logits, [params], [0.99]).item() < 30


@pytest.mark.parametrize("penalty", [0.01, 100])
def test_the_ends_of_the_penalties_leave_numbers(penalty: float) -> None:
    params = SamplingParams(
        temperature=1e-6,
        repetition_penalty=penalty,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={3: 100},
    )
    req = make_req(params, list(range(20)), [3] * 500)
    adjusted = LogitAdjuster(1, 30, [EOS], CPU)(random_logits(1, 30) * 1000, [req], [True])
    assert adjusted.isfinite().all()


# -- through an engine -------------------------------------------------------------------------------

PROMPT = [9, 10, 11, 12]


def penalized(model: Any, seed: int) -> tuple[list[int], list[int]] | None:
    """A random prompt and transformers' answer with a repetition penalty, if each token is clear."""
    draw = random.Random(seed)
    prompt = [draw.randrange(3, 320) for _ in range(4)]
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=40,
            do_sample=False,
            repetition_penalty=1.8,
            eos_token_id=None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
    best, second = torch.cat(found.scores).topk(2).values.unbind(-1)
    return (prompt, found.sequences[0, len(prompt) :].tolist()) if (best - second).min() > MARGIN else None


def test_repetition_penalty_gives_transformers_tokens(engine: Engine, model: Any) -> None:
    params = SamplingParams(max_new_tokens=40, repetition_penalty=1.8, ignore_eos=True)
    prompt, expected = next(filter(None, (penalized(model[1], seed) for seed in range(100))))
    others = [SamplingParams(max_new_tokens=60, ignore_eos=True), SamplingParams(presence_penalty=2.0)]
    results = engine.generate([prompt, [5], [6, 7]], [params, *others])
    assert results[0].output_ids == expected
    assert engine.generate(prompt, SamplingParams(max_new_tokens=40, ignore_eos=True)).output_ids != expected


def flat(entry: TokenLogprobs) -> list[float]:
    return [entry.logprob, *(part for pair in entry.top for part in pair)]


def test_log_probabilities_come_with_each_token(engine: Engine, model: Any) -> None:
    seed = clear_seed(model[1], [PROMPT], 12, temperature=1.0)
    params = SamplingParams(max_new_tokens=12, logprobs=4, ignore_eos=True, temperature=1.0, seed=seed)
    whole, other = engine.generate([PROMPT, [5]], [params, SamplingParams(max_new_tokens=12)])
    assert other.logprobs == []
    with torch.no_grad():
        logits = model[1](torch.tensor([PROMPT + whole.output_ids])).logits[0]
    expected = logits[len(PROMPT) - 1 : -1].double().log_softmax(-1)
    assert [entry.token_id for entry in whole.logprobs] == whole.output_ids
    for row, entry in zip(expected, whole.logprobs):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-3)
        assert [row[token].item() for token, _ in entry.top] == pytest.approx(row.topk(4).values.tolist())
    chunks = list(engine.stream(PROMPT, params))
    streamed = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    assert [entry.token_id for entry in streamed] == whole.output_ids
    for alone, entry in zip(streamed, whole.logprobs):  # a GPU computes a batch of two otherwise
        assert flat(alone) == pytest.approx(flat(entry), abs=1e-4)
    assert all(len(chunk.token_ids) == len(chunk.logprobs or ()) for chunk in chunks)


def test_end_tokens_wait_for_the_fewest_tokens(engine: Engine) -> None:
    early = SamplingParams(max_new_tokens=60, temperature=1.0, seed=1, logit_bias={EOS: 30})
    assert engine.generate([5], early).output_ids == [EOS]
    late = SamplingParams(max_new_tokens=60, temperature=1.0, seed=1, logit_bias={EOS: 30}, min_new_tokens=7)
    result = engine.generate([5], late)
    assert (result.completion_tokens, result.finish_reason) == (8, "stop")
    assert EOS not in result.output_ids[:7]


def test_stop_texts_wait_for_the_fewest_tokens(engine: Engine) -> None:
    free = engine.generate([7], SamplingParams(max_new_tokens=40, ignore_eos=True)).text
    stop = free[:2]
    at_once = engine.generate([7], SamplingParams(max_new_tokens=40, ignore_eos=True, stop=stop))
    assert (at_once.text, at_once.finish_reason) == ("", "stop")
    later = SamplingParams(max_new_tokens=40, ignore_eos=True, stop=stop, min_new_tokens=20)
    assert engine.generate([7], later).text.startswith(stop)


def test_no_part_of_a_stop_text_is_ever_streamed(engine: Engine, model: Any) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 80, "ignore_eos": True, "temperature": 1.0}
    settings["seed"] = clear_seed(model[1], [[7]], 80, temperature=1.0)
    text = engine.generate([7], SamplingParams(**settings)).text
    tokenizer = engine.request_manager.tokenizer
    for start in (10, 31, 52):
        stop = text[start : start + 9]
        end = text.index(stop)
        seen, shown = "", b""
        for chunk in engine.stream([7], SamplingParams(stop=[stop, "\0"], logprobs=0, **settings)):
            seen += chunk.text
            tokens = [entry.token_id for entry in chunk.shown_logprobs or ()]
            shown += b"".join(tokenizer.token_bytes(token) for token in tokens if token > EOS)
            assert text[:end].startswith(seen)
            assert seen.startswith(shown.decode("utf-8", "replace"))
        assert seen == text[:end]


def test_a_group_gives_answers_with_seeds_of_their_own(engine: Engine, model: Any) -> None:
    seed = clear_seed(model[1], [PROMPT], 16, n=3, temperature=1.0)
    params = SamplingParams(max_new_tokens=16, temperature=1.0, seed=seed, n=3, ignore_eos=True)
    groups = engine.submit_group([PROMPT, [5, 6]], params)
    results = [[handle.result(timeout=60).output_ids for handle in handles] for handles in groups]
    assert [len(handles) for handles in groups] == [3, 3]
    assert len({tuple(output) for outputs in results for output in outputs}) == 6
    again = engine.submit_group([PROMPT], params)[0]
    assert [handle.result(timeout=60).output_ids for handle in again] == results[0]
    with pytest.raises(InvalidRequestError, match=r"n=3: submit_group\(\)"):
        engine.generate(PROMPT, params)
    with pytest.raises(InvalidRequestError, match="99999 is not a token id"):
        engine.submit_group([PROMPT, [99999]], params)
    assert engine.stats()["running_requests"] == engine.stats()["waiting_requests"] == 0


def test_no_limit_of_tokens_means_as_many_as_fit(engine: Engine) -> None:
    result = engine.generate([5] * 2000, SamplingParams(max_new_tokens=None, ignore_eos=True))
    assert (result.completion_tokens, result.finish_reason) == (48, "length")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(({"max_new_tokens": bad}, "^max_new_tokens=") for bad in (0, 1.5)),
        *(({"temperature": bad}, "^temperature=") for bad in (-0.1, float("nan"), float("inf"), 10**400)),
        *(({"top_p": bad}, "^top_p=") for bad in (0, 1.1, "1")),
        *(({"top_k": bad}, "^top_k=") for bad in (0, -1)),
        *(({"stop": bad}, "^stop=") for bad in ("", ["a", ""], 5)),
        *(({"stop_token_ids": bad}, "^stop_token_ids=") for bad in (["a"], 5)),
        *(({"priority": bad}, "^priority=") for bad in (1.5, 10**6)),
        ({"seed": 1.0}, "^seed="),
        ({"ignore_eos": 1}, "^ignore_eos="),
        ({"min_p": 1.5}, r"min_p=1\.5: write a number from 0 to 1"),
        ({"min_p": float("nan")}, "min_p=nan"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: write a number from 0.01 to 100"),
        ({"frequency_penalty": 2.1}, r"frequency_penalty=2\.1: write a number from -2 to 2"),
        ({"presence_penalty": True}, "presence_penalty=True"),
        ({"logit_bias": {"a": 1}}, "logit_bias=.*token ids and numbers from -100 to 100"),
        ({"logit_bias": {1: 101}}, "logit_bias="),
        ({"logprobs": 21}, "logprobs=21: write a whole number from 0 to 20"),
        ({"n": 0}, "n=0: write a whole number from 1 to 128"),
        ({"seed": 2**64}, "seed=.*64 bits"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9: write at most max_new_tokens=8"),
        ({"json_schema": 3}, "json_schema=3: write a JSON schema"),
        ({"json_schema": {"enum": [1j]}}, "json_schema=.*write values that JSON can represent .*complex"),
        ({"json_schema": {}, "min_new_tokens": 1}, "min_new_tokens=1: write 0 together with json_schema"),
        ({"stop": ["x"] * 65}, r"stop=.*write at most 64 texts of at most 1024 characters"),
        ({"stop": "x" * 1025}, "stop=.*write at most 64 texts"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids=.*at most 1024 token ids"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias=.*at most 1024 token ids"),
        ({"stop": ["x" * 10**6, ""]}, r"stop=\[.{1,200}: write a text"),
    ],
)
def test_bad_values_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**fields)


# -- schemas -----------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.5, "seed": 4}, {"ignore_eos": True}])
def test_a_schema_is_kept_whatever_the_model_would_say(engine: Engine, settings: dict[str, Any]) -> None:
    params = SamplingParams(max_new_tokens=300, json_schema=SCHEMA, **settings)
    free = SamplingParams(max_new_tokens=20, ignore_eos=True)
    held, other, text = engine.generate(
        [PROMPT, [5], PROMPT], [params, free, SamplingParams(max_new_tokens=300, json_schema="{}")]
    )
    assert held.finish_reason == "stop"
    streamed = "".join(chunk.text for chunk in engine.stream(PROMPT, params))
    for answer in map(json.loads, (held.text, streamed)):
        assert set(answer) == {"name", "age", "colour"}
        assert 0 <= answer["age"] <= 150
        assert answer["colour"] in ("red", "green")
    assert other.output_ids == engine.generate([5], free).output_ids
    if text.finish_reason == "stop":
        json.loads(text.text)


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        "[]",
        '{"type": "nonsense"}',
        '{"$ref": "http://x/y"}',
        '{"pattern": "(", "type": "string"}',
        json.dumps({"enum": list(range(20000))}),  # longer than is taken
    ],
)
def test_schemas_that_cannot_be_kept_are_refused(engine: Engine, schema: str) -> None:
    with pytest.raises(InvalidRequestError, match="json_schema"):
        engine.generate(PROMPT, SamplingParams(json_schema=schema))
