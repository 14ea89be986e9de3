"""Llama and similar models: grouped-query attention, rotary positions, gated MLP, RMS norms.

Qwen2 adds biases, Qwen3 norms of each head, Qwen3-MoE experts, as the config specifies.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sgl_aspects.errors import ConfigError
from sgl_aspects.runtime.attention.base import Attention
from sgl_aspects.runtime.communicator import Communicator
from sgl_aspects.runtime.core import ForwardBatch
from sgl_aspects.runtime.loader.model_config import ModelConfig
from sgl_aspects.runtime.models.decoder import CausalLM
from sgl_aspects.runtime.ops import MergedLinear, RMSNorm, RotaryEmbedding, RowParallelLinear


class LlamaAttention(nn.Module):
    """Grouped heads; with biases, or with a norm of each head, where the config has them."""

    def __init__(self, config: ModelConfig, layer_id: int, dtype: torch.dtype, tp: Communicator) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads = tp.share(config.num_heads, "the attention heads")
        ranks, kv_heads = tp.world_size, config.num_kv_heads
        if ranks % kv_heads and kv_heads % ranks:
            raise ConfigError(f"tp_size={ranks} and {kv_heads} key-value heads: one must divide the other")
        copies = max(ranks // kv_heads, 1)
        sizes = {"q_proj": config.num_heads, "k_proj": kv_heads, "v_proj": kv_heads}
        self.qkv_proj = MergedLinear(
            config.hidden_size,
            {name: count * config.head_dim for name, count in sizes.items()},
            dtype,
            tp,
            bias=config.attention_bias,
            copies={"k_proj": copies, "v_proj": copies},
        )
        self.query_size = heads * config.head_dim
        total = config.num_heads * config.head_dim
        self.o_proj = RowParallelLinear(
            total, config.hidden_size, dtype, tp, bias=config.attention_output_bias
        )
        self.attention = Attention(layer_id, heads, max(kv_heads // ranks, 1), config.head_dim)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)

    def forward(
        self, hidden: Tensor, rotary: RotaryEmbedding, positions: Tensor, batch: ForwardBatch
    ) -> Tensor:
        qkv = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)
        heads, kv_heads = self.attention.tp_q_head_num, self.attention.tp_k_head_num
        query, key, value = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if self.qk_norm:
            query = self.q_norm(query.reshape(-1, self.head_dim)).view_as(query)
            key = self.k_norm(key.reshape(-1, self.head_dim)).view_as(key)
        query, key = rotary(query, key, positions)
        attended = self.attention(query, key, value, batch)
        output: Tensor = self.o_proj(attended.reshape(len(hidden), self.query_size))
        return output


class LlamaForCausalLM(CausalLM):
    def make_attention(self, layer_id: int) -> nn.Module:
        return LlamaAttention(self.config, layer_id, self.dtype, self.tp)
