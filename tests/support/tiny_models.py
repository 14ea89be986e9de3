"""Tiny random checkpoints, made with transformers."""

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
#: The text of the tests' prompts, so that the tokenizer has some merges to do.
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


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16,
    "beta_slow": 1,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}
#: By name: transformers' prefix of the classes, and settings beside the common sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gemma": ("Gemma", {"head_dim": 24, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24, "rope_parameters": _YARN}),
    "qwen3 experts": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek v2": (
        "DeepseekV2",
        {
            **_MLA,
            "topk_method": "group_limited_greedy",
            "q_lora_rank": None,
            "routed_scaling_factor": 2.0,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek v3": (
        "DeepseekV3",
        {**_MLA, "attention_bias": True, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek v3.2": (
        "DeepseekV32",
        # With few index heads some tokens suit by exactly 0, and which of them are read is chance.
        {**_MLA, "index_topk": 24, "index_head_dim": 32, "index_n_heads": 32},
    ),
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
    """Save a random Llama with tokenizer and chat template in ``folder``; return transformers' model."""
    return make_model(folder, "llama", max_shard_size=max_shard_size, **overrides)


def llama_fixture(**overrides: Any) -> Any:
    """A fixture of a file: the folder of a random Llama, which is named tiny."""
    import pytest

    @pytest.fixture(scope="module")
    def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("models") / "tiny"
        make_llama(folder, **overrides)
        return folder

    return made


def make_model(
    folder: Path, family: str, *, max_shard_size: str = "1GB", seed: int = 7, **overrides: Any
) -> Any:
    """Save a random model of a family; return transformers' model."""
    import json

    import transformers

    prefix, own = FAMILIES[family]
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    settings: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # far from uniform answers
        "bos_token_id": 0,
        "eos_token_id": 2,
        **own,
        **overrides,
    }
    config = getattr(transformers, f"{prefix}Config")(**settings)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.normal_(mean=1.0, std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "bos_token": None}))
    return model.eval()
