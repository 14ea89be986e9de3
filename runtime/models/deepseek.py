"""DeepSeek V2, V3 and V3.2: latent attention, experts in groups, and an indexer for sparse attention.

Attention runs on the compressed rows themselves. The key projection is applied to the query instead, and the
value projection to the output of attention:

    score = q · (W_k latent) + q_rope · k_rope = (W_kᵀ q) · latent + q_rope · k_rope
    value = Σ weight (W_v latent) = W_v (Σ weight latent)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from sgl_aspects.runtime.attention.base import Attention, IndexerInputs
from sgl_aspects.runtime.communicator import Communicator
from sgl_aspects.runtime.core import ForwardBatch
from sgl_aspects.runtime.loader.model_config import IndexerConfig, MLAConfig, ModelConfig
from sgl_aspects.runtime.loader.weights import Target
from sgl_aspects.runtime.models.decoder import CausalLM
from sgl_aspects.runtime.ops import (
    ColumnParallelLinear,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
)
from sgl_aspects.runtime.ops.base import parameter
from sgl_aspects.runtime.ops.rotary import yarn_mscale


class LatentHeads(nn.Module):
    """``kv_b_proj``, from a latent to each head's key and value; applied to queries and outputs instead."""

    def __init__(self, mla: MLAConfig, heads: int, dtype: torch.dtype, tp: Communicator) -> None:
        super().__init__()
        self._tp = tp
        self._shape = (heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
        self._key_dim = mla.qk_nope_head_dim
        self.weight = parameter(self._shape[0] * self._shape[1], self._shape[2], dtype=dtype)

    def queries(self, query: Tensor) -> Tensor:
        """[tokens, heads, qk_nope_head_dim] → [tokens, heads, kv_lora_rank], to compare with latents."""
        return torch.einsum("thn,hnl->thl", query, self.weight.view(self._shape)[:, : self._key_dim])

    def outputs(self, attended: Tensor) -> Tensor:
        """[tokens, heads, kv_lora_rank], sums of latents, → [tokens, heads, v_head_dim]."""
        return torch.einsum("thl,hvl->thv", attended, self.weight.view(self._shape)[:, self._key_dim :])

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        yield f"{prefix}weight", Target(self.weight.data, 0, self._tp.rank, self._tp.world_size)


class Indexer(nn.Module):
    """Scores each earlier token for a query: the backend reads the best. Whole on each rank."""

    def __init__(
        self, config: ModelConfig, mla: MLAConfig, indexer: IndexerConfig, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.indexer = indexer
        self.rope_dim = mla.qk_rope_head_dim
        size = indexer.num_heads * indexer.head_dim
        self.wq_b = Linear(mla.q_lora_rank or config.hidden_size, size, dtype)
        self.wk = Linear(config.hidden_size, indexer.head_dim, dtype)
        self.k_norm = nn.LayerNorm(indexer.head_dim, eps=1e-6, dtype=dtype)
        self.weights_proj = Linear(config.hidden_size, indexer.num_heads, dtype)

    def forward(
        self, hidden: Tensor, query: Tensor, rotary: RotaryEmbedding, positions: Tensor
    ) -> IndexerInputs:
        """``query`` is the compressed one, [tokens, q_lora_rank]."""
        heads = self.wq_b(query).view(len(hidden), self.indexer.num_heads, self.indexer.head_dim)
        key = self.k_norm(self.wk(hidden)).unsqueeze(1)
        # Its rotary pairs are halves, whatever those of the attention are.
        turned, turned_key = rotary(heads[..., : self.rope_dim], key[..., : self.rope_dim], positions)
        return IndexerInputs(
            query=torch.cat((turned, heads[..., self.rope_dim :]), dim=-1),
            key=torch.cat((turned_key, key[..., self.rope_dim :]), dim=-1).squeeze(1),
            weights=self.weights_proj(hidden).float() * self.indexer.num_heads**-0.5,
            topk=self.indexer.topk,
        )


class LatentAttention(nn.Module):
    def __init__(
        self, config: ModelConfig, mla: MLAConfig, layer_id: int, dtype: torch.dtype, tp: Communicator
    ) -> None:
        super().__init__()
        self.mla = mla
        hidden, bias, eps = config.hidden_size, config.attention_bias, config.rms_norm_eps
        heads = tp.share(config.num_heads, "the attention heads")
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        row = mla.kv_lora_rank + mla.qk_rope_head_dim
        size = config.num_heads * head_dim
        if mla.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(hidden, size, dtype, tp)
        else:
            self.q_a_proj = Linear(hidden, mla.q_lora_rank, dtype, bias=bias)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, eps, dtype)
            self.q_b_proj = ColumnParallelLinear(mla.q_lora_rank, size, dtype, tp)
        self.kv_a_proj_with_mqa = Linear(hidden, row, dtype, bias=bias)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, eps, dtype)
        self.kv_b_proj = LatentHeads(mla, heads, dtype, tp)
        self.o_proj = RowParallelLinear(
            config.num_heads * mla.v_head_dim, hidden, dtype, tp, bias=config.attention_output_bias
        )
        scale = head_dim**-0.5
        rope = config.rope
        if rope.scaling != "default" and rope.mscale_all_dim:
            scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
        self.attention = Attention(layer_id, heads, 1, row, v_head_dim=mla.kv_lora_rank, scale=scale)
        self.indexer = Indexer(config, mla, mla.indexer, dtype) if mla.indexer else None

    def forward(
        self, hidden: Tensor, rotary: RotaryEmbedding, positions: Tensor, batch: ForwardBatch
    ) -> Tensor:
        mla, tokens = self.mla, len(hidden)
        compressed = hidden
        if mla.q_lora_rank is None:
            query = self.q_proj(hidden)
        else:
            compressed = self.q_a_layernorm(self.q_a_proj(hidden))
            query = self.q_b_proj(compressed)
        query = query.view(tokens, self.attention.tp_q_head_num, -1)
        plain, query_rope = query.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        row = self.kv_a_proj_with_mqa(hidden)
        latent, key_rope = row.split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        latent = self.kv_a_layernorm(latent.contiguous()).unsqueeze(1)
        key_rope = key_rope.unsqueeze(1)
        if mla.interleaved:
            query_rope, key_rope = _halves(query_rope), _halves(key_rope)
        query_rope, key_rope = rotary(query_rope, key_rope, positions)
        query = torch.cat((self.kv_b_proj.queries(plain), query_rope), dim=-1)
        key = torch.cat((latent, key_rope), dim=-1)
        index = self.indexer(hidden, compressed, rotary, positions) if self.indexer else None
        attended = self.attention(query, key, latent, batch, index)
        output: Tensor = self.o_proj(self.kv_b_proj.outputs(attended).reshape(tokens, -1))
        return output


class DeepseekForCausalLM(CausalLM):
    """The model of all three versions: the config distinguishes them."""

    def make_attention(self, layer_id: int) -> nn.Module:
        assert self.config.mla is not None  # hf_config.py reads it for every Deepseek architecture
        return LatentAttention(self.config, self.config.mla, layer_id, self.dtype, self.tp)

    def may_skip(self, name: str) -> bool:
        """Skip layers past the last, which predict further tokens at once."""
        layer = name.removeprefix("model.layers.").partition(".")[0]
        return super().may_skip(name) or (layer.isdigit() and int(layer) >= self.config.num_layers)


def _halves(x: Tensor) -> Tensor:
    """Reorder pairs of neighbours to pairs of halves: 0 1 2 3 4 5 to 0 2 4 1 3 5."""
    return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
