"""A Llama of a few thousand random weights, in a Hugging Face folder: small, real, and made without a hub."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, CONTEXT = 258, 32, 2, 4, 2, 64, 1024

_CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def make_tiny_llama(folder: Path) -> Path:
    """Writes configuration, weights and a byte-level tokenizer; each ASCII character is one token."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(), folder / "model.safetensors")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": _CHAT_TEMPLATE})
    )
    return folder


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    head = HIDDEN // HEADS
    weights = {
        "model.embed_tokens.weight": random(VOCABULARY, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
            prefix + "self_attn.q_proj.weight": random(HEADS * head, HIDDEN),
            prefix + "self_attn.k_proj.weight": random(KV_HEADS * head, HIDDEN),
            prefix + "self_attn.v_proj.weight": random(KV_HEADS * head, HIDDEN),
            prefix + "self_attn.o_proj.weight": random(HIDDEN, HEADS * head),
            prefix + "mlp.gate_proj.weight": random(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": random(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": random(HIDDEN, INTERMEDIATE),
        }
    return weights
