"""Answers of the tiny model: by transformers, or by plain formulas in float64, recomputed for each token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sgl_aspects.conformance.attention import dense_attention
from sgl_aspects.conformance.operators import gated, normalized, rotated

_HEAD_DIM = 16


def greedy_by_transformers(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        answers.append(generated[0, len(prompt) :].tolist())
    return answers


def greedy_in_float64(
    weights: Mapping[str, torch.Tensor], prompts: list[list[int]], count: int
) -> list[list[int]]:
    exact = {name: tensor.double() for name, tensor in weights.items()}
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(_logits(exact, tokens).argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def largest_gap(
    weights: Mapping[str, torch.Tensor], prompts: list[list[int]], answers: list[list[int]]
) -> float:
    """Return the largest gap of an answer token to the best one, in standard deviations of the logits.

    0: each is the best. Half precision may prefer one close to it.
    """
    exact = {name: tensor.double() for name, tensor in weights.items()}
    largest = 0.0
    for prompt, answer in zip(prompts, answers):
        for place, token in enumerate(answer):
            logits = _logits(exact, [*prompt, *answer[:place]])
            largest = max(largest, float((logits.max() - logits[token]) / logits.std()))
    return largest


def _logits(weights: Mapping[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """[vocab], after the last token."""
    x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    layer = 0
    while f"model.layers.{layer}.input_layernorm.weight" in weights:
        x = _layer(weights, f"model.layers.{layer}.", x)
        layer += 1
    return normalized(x[-1], weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def _layer(weights: Mapping[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    def project(name: str, value: torch.Tensor) -> torch.Tensor:
        return value @ weights[f"{prefix}{name}.weight"].T

    normed = normalized(x, weights[f"{prefix}input_layernorm.weight"])
    query = project("self_attn.q_proj", normed).view(len(x), -1, _HEAD_DIM)
    positions = torch.arange(len(x))
    if f"{prefix}self_attn.kv_b_proj.weight" in weights:
        plain, turning = query.view(len(x), -1, 2, _HEAD_DIM).unbind(2)
        row = project("self_attn.kv_a_proj_with_mqa", normed)
        latent = normalized(row[:, :-_HEAD_DIM], weights[f"{prefix}self_attn.kv_a_layernorm.weight"])
        heads = project("self_attn.kv_b_proj", latent).view(len(x), -1, 2 * _HEAD_DIM)
        key, value = heads.chunk(2, -1)
        # Its pairs are neighbours. That the others turn pairs of halves changes no product of two rows.
        turned = rotated(_halves(row[:, None, -_HEAD_DIM:]), positions).expand_as(key)
        query = torch.cat((plain, rotated(_halves(turning), positions)), -1)
        key = torch.cat((key, turned), -1)
    else:
        key, value = (project(f"self_attn.{n}_proj", normed).view(len(x), -1, _HEAD_DIM) for n in "kv")
        query, key = rotated(query, positions), rotated(key, positions)
    attended = dense_attention(query, key, value, 0)
    x = x + project("self_attn.o_proj", attended.reshape(len(x), -1))
    normed = normalized(x, weights[f"{prefix}post_attention_layernorm.weight"])
    inner = gated(torch.cat((project("mlp.gate_proj", normed), project("mlp.up_proj", normed)), -1))
    return x + project("mlp.down_proj", inner)


def _halves(x: torch.Tensor) -> torch.Tensor:
    """Reorder pairs of neighbours to pairs of halves."""
    return torch.cat((x[..., ::2], x[..., 1::2]), -1)
