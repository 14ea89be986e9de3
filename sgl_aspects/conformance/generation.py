"""A whole model on the platform: chunked prompts, ragged batches, and the tokens that a reference gives."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from sgl_aspects.conformance.check import Bench, check, if_declared, require
from sgl_aspects.conformance.tiny_model import LATENT, right_tokens, write_tiny_model

_TOKENS = 16


def prompts() -> list[list[int]]:
    """Lengths near the edges of pages (8) and chunks (24)."""
    draw = random.Random(5)
    return [[draw.randrange(256) for _ in range(length)] for length in (1, 7, 8, 25, 40)]


@check(write="get_attention_backends", expects="the tokens of the reference, twice")
def greedy(bench: Bench) -> str:
    return _generate(bench, "tiny-llama", {})


@check(
    write="get_kv_pool_cls", expects="the tokens of the reference from a model with latent keys and values"
)
def latent(bench: Bench) -> str:
    if_declared(lambda: bench.platform.get_kv_pool_cls(kind="mla"), "no pool of kind mla")
    return _generate(bench, "tiny-deepseek", LATENT)


def _generate(bench: Bench, name: str, config: Mapping[str, Any]) -> str:
    from sgl_aspects.runtime.engine import Engine
    from sgl_aspects.runtime.sampling_params import SamplingParams

    folder = bench.folder / name
    weights, given = write_tiny_model(folder, config), prompts()
    right = right_tokens(bench.reference, folder, weights, given, _TOKENS)
    params = SamplingParams(max_new_tokens=_TOKENS, ignore_eos=True)
    engine = Engine(
        model_path=folder, dtype="float32", page_size=8, max_total_tokens=1024, chunked_prefill_size=24
    )
    try:
        rounds = [[result.output_ids for result in engine.generate(given, params)] for _ in range(2)]
    finally:
        engine.shutdown()
    for number, found in enumerate(rounds, 1):
        for prompt, tokens, expected in zip(given, found, right):
            same = next((i for i, (a, b) in enumerate(zip(tokens, expected)) if a != b), len(expected))
            require(
                tokens == expected,
                f"{expected} after a prompt of {len(prompt)} tokens, by {bench.reference}",
                f"{tokens} in round {number}: the same up to token {same}",
                "the operators and the attention backend, or the pool: see the checks above",
            )
    return f"{len(given)} prompts × {_TOKENS} tokens, equal to {bench.reference}, twice"
