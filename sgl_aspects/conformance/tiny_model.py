"""A tiny random model as a Hugging Face folder, written without transformers: a Llama, or a Deepseek V2.

And the right answers of it: by transformers, or by plain formulas in float64, recomputed for each token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sgl_aspects.conformance.attention import dense_attention
from sgl_aspects.conformance.operators import gated, normalized, rotated

_HEAD_DIM = 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


#: A model with latent keys and values, whose layers are dense.
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "first_k_dense_replace": 2,
    "moe_layer_freq": 1,
    # SGLang's rotation on CPUs is that of yarn alone, which with a factor of 1 changes nothing.
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def write_tiny_model(folder: Path, other_config: Mapping[str, Any] | None = None) -> dict[str, torch.Tensor]:
    """Write it to ``folder``; returns its weights under their Hugging Face names.

    ``other_config``: changed values of the configuration; LATENT for the other kind of model.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **(other_config or {})}
    weights = random_weights(is_latent="kv_lora_rank" in config)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(_byte_tokenizer())
    return weights


def random_weights(*, is_latent: bool = False) -> dict[str, torch.Tensor]:
    """Return large weights, so that rounding does not decide which token is likeliest."""
    generator = torch.Generator().manual_seed(11)
    hidden, inner, vocab, rank, rope = 64, 112, 256, 32, 16

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    def norm(size: int = hidden) -> torch.Tensor:
        return 1 + torch.randn(size, generator=generator) * 0.2

    def attention() -> dict[str, torch.Tensor]:
        if is_latent:
            return {
                "self_attn.q_proj": random(2 * hidden, hidden),
                "self_attn.kv_a_proj_with_mqa": random(rank + rope, hidden),
                "self_attn.kv_a_layernorm": norm(rank),
                "self_attn.kv_b_proj": random(2 * hidden, rank),
            }
        return {
            "self_attn.q_proj": random(hidden, hidden),
            "self_attn.k_proj": random(hidden // 2, hidden),
            "self_attn.v_proj": random(hidden // 2, hidden),
        }

    weights = {"model.embed_tokens.weight": random(vocab, hidden), "lm_head.weight": random(vocab, hidden)}
    for layer in range(2):
        weights |= {
            f"model.layers.{layer}.{name}.weight": tensor
            for name, tensor in {
                "input_layernorm": norm(),
                **attention(),
                "self_attn.o_proj": random(hidden, hidden),
                "post_attention_layernorm": norm(),
                "mlp.gate_proj": random(inner, hidden),
                "mlp.up_proj": random(inner, hidden),
                "mlp.down_proj": random(hidden, inner),
            }.items()
        }
    return weights | {"model.norm.weight": norm()}


def _byte_tokenizer() -> str:
    """Return a tokenizer with one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text: str = tokenizer.to_str()
    return text


# -- the right answers --------------------------------------------------------------------------------------


def right_tokens(
    reference: str, folder: Path, weights: Mapping[str, torch.Tensor], prompts: list[list[int]], count: int
) -> list[list[int]]:
    """Return what ``reference``, "transformers" or "float64", answers to the prompts."""
    exact = {name: tensor.double() for name, tensor in weights.items()}
    logits = _transformers(folder) if reference == "transformers" else partial(_logits, exact)
    answers = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(logits(tokens).argmax()))
        answers.append(tokens[len(prompt) :])
    return answers


def _transformers(folder: Path) -> Callable[[list[int]], torch.Tensor]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return lambda tokens: model(torch.tensor([tokens])).logits[0, -1]


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
