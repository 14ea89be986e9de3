"""Llama and its family: grouped-query attention, rotary positions, gated MLP, RMS norms."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from sgl_aspects.runtime.forward_batch import ForwardBatch
from sgl_aspects.runtime.loader.model_config import ModelConfig
from sgl_aspects.runtime.models.weights import fill_weights
from sgl_aspects.runtime.ops import (
    Angles,
    Attention,
    Embedding,
    Linear,
    MergedLinear,
    RMSNorm,
    RotaryEmbedding,
    SiluAndMul,
)


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.query_size = config.num_heads * config.head_dim
        self.key_size = config.num_kv_heads * config.head_dim
        self.qkv_proj = MergedLinear(
            config.hidden_size,
            {"q_proj": self.query_size, "k_proj": self.key_size, "v_proj": self.key_size},
            bias=config.attention_bias,
            dtype=dtype,
        )
        self.o_proj = Linear(self.query_size, config.hidden_size, bias=config.attention_bias, dtype=dtype)
        self.attention = Attention(layer_id, config.num_heads, config.num_kv_heads, config.head_dim)

    def forward(
        self, hidden: torch.Tensor, rotary: RotaryEmbedding, angles: Angles, batch: ForwardBatch
    ) -> torch.Tensor:
        qkv = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)
        heads, kv_heads = self.attention.num_heads, self.attention.num_kv_heads
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
        query, key = rotary(query, key, angles)
        attended = self.attention(query, key, value, batch)
        output: torch.Tensor = self.o_proj(attended.reshape(len(hidden), self.query_size))
        return output


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.intermediate_size
        self.gate_up_proj = MergedLinear(
            config.hidden_size, {"gate_proj": size, "up_proj": size}, bias=config.mlp_bias, dtype=dtype
        )
        self.activation = SiluAndMul()
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(hidden)))
        return output


class LlamaDecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = LlamaAttention(config, layer_id, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = LlamaMLP(config, dtype)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        rotary: RotaryEmbedding,
        angles: Angles,
        batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``residual`` is the stream so far; ``hidden`` what the layer before adds to it."""
        normed, residual = self.input_layernorm(hidden, residual)
        attended = self.self_attn(normed, rotary, angles, batch)
        normed, residual = self.post_attention_layernorm(attended, residual)
        return self.mlp(normed), residual


class LlamaModel(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, context_length: int) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, context_length, dtype)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i, dtype) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        residual = self.embed_tokens(batch.input_ids)
        hidden = torch.zeros_like(residual)
        angles = self.rotary.angles(batch.positions)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, self.rotary, angles, batch)
        normed: torch.Tensor
        # Only the last token of each request is asked for its successor.
        last = batch.last_token_indices
        normed, _ = self.norm(hidden.index_select(0, last), residual.index_select(0, last))
        return normed


class LlamaForCausalLM(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, context_length: int) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, dtype, context_length)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.lm_head.shares_weight = True

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [batch_size, vocab_size] of each request's next token."""
        logits: torch.Tensor = self.lm_head(self.model(batch))
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """``weights`` under their Hugging Face names."""

        def may_skip(name: str) -> bool:
            # Older checkpoints carry tables that are computed here, and a tied head may be saved twice.
            return name.endswith("rotary_emb.inv_freq") or (
                self.config.tie_word_embeddings and name == "lm_head.weight"
            )

        fill_weights(self._targets(), weights, may_skip=may_skip)

    def _targets(self) -> dict[str, torch.Tensor]:
        """Every parameter by the name that checkpoints use, merged operators by their parts."""
        targets: dict[str, torch.Tensor] = {}
        for path, module in self.named_modules():
            if isinstance(module, MergedLinear):
                targets.update(module.part_targets(path.rpartition(".")[0] + "."))
            else:
                for name, parameter in module.named_parameters(recurse=False):
                    targets[f"{path}.{name}"] = parameter.data
        if self.config.tie_word_embeddings:
            targets.pop("lm_head.weight")
        return targets
