"""Prompts with one right answer: no instruction set, number of threads or version of torch changes a token.

The order in which a kernel adds is the processor's choice. Where a model's two best tokens, or two of its
experts, are nearly equal, that order decides between them. So prompts are drawn until every step is clear:
the next best token is ``MARGIN`` behind, for the model as it is and for copies whose weights differ by a
hundred times what float32 rounds.
"""

from __future__ import annotations

import copy
import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sgl_aspects.runtime import SamplingParams
from sgl_aspects.runtime.sampling.sampler import Sampler
from tests.support.tiny_models import make_model

Prompts = list[list[int]]
Draw = Callable[[random.Random], Prompts]

#: Logits of the tiny models are about 2, and sums of another order differ by some 1e-6.
MARGIN = 1e-3
PROMPT_LENGTHS = (1, 2, 5, 16, 17, 40, 63, 100)
_DISTURBANCE = 1e-5
_COPIES = 3
_DRAWS = 100


def random_prompts(draw: random.Random) -> Prompts:
    """One of each of PROMPT_LENGTHS, without the special tokens."""
    return [[draw.randrange(3, 320) for _ in range(length)] for length in PROMPT_LENGTHS]


def clear_answers(
    model: Any, new_tokens: int, prompts: Draw = random_prompts, *, ignore_eos: bool = True
) -> tuple[Prompts, Prompts]:
    """Return prompts with one right answer, and transformers' greedy answers to them."""
    clear, (answers,) = clear_answers_of([model], new_tokens, prompts, ignore_eos=ignore_eos)
    return clear, answers


def clear_answers_of(
    models: Sequence[Any], new_tokens: int, prompts: Draw = random_prompts, *, ignore_eos: bool = True
) -> tuple[Prompts, list[Prompts]]:
    """Return prompts that are clear for each of ``models``, and the answers of each."""
    for seed in range(_DRAWS):
        drawn = prompts(random.Random(seed))
        answers = [greedy(model, drawn, new_tokens, ignore_eos=ignore_eos) for model in models]
        if all(map(_all_clear, models, itertools.repeat(drawn), answers)):
            return drawn, answers
    raise AssertionError(f"in {_DRAWS} draws some token was always less than {MARGIN} behind the best")


def clear_model(
    folder: Path, prompts: Prompts, new_tokens: int, *, family: str = "llama", seed: int = 0, **overrides: Any
) -> tuple[Any, Prompts]:
    """Save the first model from ``seed`` on for which ``prompts`` are clear; return it and its answers."""
    for number in range(seed, seed + _DRAWS):
        model = make_model(folder, family, seed=number, **overrides)
        answers = greedy(model, prompts, new_tokens, ignore_eos=True)
        if _all_clear(model, prompts, answers):
            return model, answers
    raise AssertionError(f"for each of {_DRAWS} models some token is less than {MARGIN} behind the best")


def clear_seed(model: Any, prompts: Prompts, new_tokens: int, *, n: int = 1, **sampling: Any) -> int:
    """Return a seed with which ``prompts``, sampled with these settings, have one right answer each.

    ``n`` answers to each prompt take this seed and the following ones.
    """
    for seed in range(_DRAWS):
        each = [SamplingParams(max_new_tokens=new_tokens, seed=seed + i, **sampling) for i in range(n)]
        if all(_is_sampled_clearly(model, *pair) for pair in itertools.product(prompts, each)):
            return seed
    raise AssertionError(f"each of {_DRAWS} seeds has a draw at the edge of two tokens")


_ANSWERS: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _once(model: Any, key: str, compute: Callable[[], Any]) -> Any:
    known = _ANSWERS.setdefault(model, {})
    if key not in known:
        known[key] = compute()
    return known[key]


def greedy(model: Any, prompts: Prompts, new_tokens: int, *, ignore_eos: bool = False) -> Prompts:
    """transformers' greedy answers to ``prompts``, as one left-padded batch; computed once per model."""
    key = repr((prompts, new_tokens, ignore_eos))
    answers: Prompts = _once(model, key, lambda: _greedy(model, prompts, new_tokens, ignore_eos))
    return answers


def _greedy(model: Any, prompts: Prompts, new_tokens: int, ignore_eos: bool) -> Prompts:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    if ignore_eos:
        settings |= {"eos_token_id": None, "min_new_tokens": new_tokens}
    with torch.no_grad():
        found = model.generate(ids, attention_mask=mask, **settings)
    end = None if ignore_eos else model.generation_config.eos_token_id
    rows = found[:, longest:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def _all_clear(model: Any, prompts: Prompts, answers: Prompts) -> bool:
    def compute() -> bool:
        models = (model, *_disturbed(model))
        return all(margin(each, *pair) > MARGIN for pair in zip(prompts, answers) for each in models)

    clear: bool = _once(model, repr(("clear", prompts, answers)), compute)
    return clear


def margin(model: Any, prompt: list[int], answer: list[int]) -> float:
    """Return how far each token of ``answer`` leads the next best; 0 if one is not the best."""
    best = _logits(model, prompt, answer).topk(2)
    if best.indices[:, 0].tolist() != answer:
        return 0.0
    return float((best.values[:, 0] - best.values[:, 1]).min())


def _logits(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[tokens of the answer, vocab]: what each of them is chosen from."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 :]


def _disturbed(model: Any) -> list[Any]:
    copies: list[Any] = _once(model, "disturbed", lambda: [_disturb(model, i) for i in range(_COPIES)])
    return copies


def _disturb(model: Any, seed: int) -> Any:
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + _DISTURBANCE * torch.randn(parameter.shape, generator=generator))
    return other


def _is_sampled_clearly(model: Any, prompt: list[int], params: SamplingParams) -> bool:
    """Return whether slightly other numbers, and slightly other logits, give the same tokens."""
    draw, noise = random.Random(params.seed), torch.Generator().manual_seed(0)
    answer: list[int] = []
    for _ in range(params.max_new_tokens or 0):
        number, logits = draw.random(), _logits(model, prompt, [*answer, 0])[-1:]
        numbers = [min(max(number + i * _DISTURBANCE, 0.0), 1 - _DISTURBANCE) for i in (-1, 0, 1)]
        rows = logits * (1 + _DISTURBANCE * torch.randn(3 * _COPIES, logits.shape[1], generator=noise))
        tokens = Sampler()(rows, [params] * len(rows), numbers * _COPIES).tolist()
        if len(set(tokens)) > 1:
            return False
        answer.append(tokens[0])
    return True
