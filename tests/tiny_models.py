"""Tiny random Llama checkpoints, made with transformers, and what transformers itself answers with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
#: What the tests' prompts are made of, so that the tokenizer has some merges to do.
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "ein Käsebrot für fünf Füchse",
    "日本語 и русский 🙂🙃",
]

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "own head size, no groups": {"head_dim": 24, "num_key_value_heads": 4},
    "llama3 positions": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def make_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE: all bytes, some merges, and the special tokens <|text|> 0, <|start|> 1, <|end|> 2."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|text|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def make_llama(folder: Path, *, max_shard_size: str = "1GB", **overrides: Any) -> Any:
    """Save a random model with tokenizer and chat template in ``folder``; return transformers' model."""
    import json

    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    tokenizer = make_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # far from uniform answers: the likeliest token is no matter of rounding
        "bos_token_id": 0,
        "eos_token_id": 2,
        **overrides,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.normal_(mean=1.0, std=0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "bos_token": None}))
    return model.eval()


def greedy(
    model: Any, prompts: list[list[int]], max_new_tokens: int, *, ignore_eos: bool = False
) -> list[list[int]]:
    """What transformers generates greedily after each of ``prompts``, as one batch padded on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 0}
    if ignore_eos:
        settings |= {"eos_token_id": None, "min_new_tokens": max_new_tokens}
    with torch.no_grad():
        rows = model.generate(ids, attention_mask=mask, **settings)[:, longest:].tolist()
    end = None if ignore_eos else model.generation_config.eos_token_id
    return [row[: row.index(end) + 1] if end in row else row for row in rows]
