"""The parts that all models share: embeddings, a stack of decoder layers, a norm, and the head.

A family is a subclass of :class:`CausalLM` that defines its layers' attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sgl_aspects.runtime.communicator import Communicator
from sgl_aspects.runtime.core import ForwardBatch
from sgl_aspects.runtime.loader.model_config import ModelConfig
from sgl_aspects.runtime.loader.weights import fill_weights, weight_targets
from sgl_aspects.runtime.models.mlp import GatedMLP, MoEBlock
from sgl_aspects.runtime.ops import ColumnParallelLinear, Embedding, GemmaRMSNorm, RMSNorm, RotaryEmbedding


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        norm = GemmaRMSNorm if config.norm_adds_one else RMSNorm
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = attention
        self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = mlp

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor,
        rotary: RotaryEmbedding,
        positions: Tensor,
        batch: ForwardBatch,
    ) -> tuple[Tensor, Tensor]:
        """``residual`` is the stream so far; ``hidden`` the previous layer's addition to it."""
        normed, residual = self.input_layernorm(hidden, residual)
        attended = self.self_attn(normed, rotary, positions, batch)
        normed, residual = self.post_attention_layernorm(attended, residual)
        return self.mlp(normed), residual


class DecoderModel(nn.Module):
    def __init__(
        self, config: ModelConfig, layers: Iterable[nn.Module], dtype: torch.dtype, context_length: int
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.embedding_scale = torch.tensor(config.embedding_scale).to(dtype).item()
        self.rotary = RotaryEmbedding(config.rope, config.rotary_dim, context_length, dtype)
        self.layers = nn.ModuleList(layers)
        norm = GemmaRMSNorm if config.norm_adds_one else RMSNorm
        self.norm = norm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(self, batch: ForwardBatch) -> Tensor:
        residual = self.embed_tokens(batch.input_ids)
        if self.embedding_scale != 1.0:
            residual = residual * self.embedding_scale
        hidden = torch.zeros_like(residual)
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, self.rotary, batch.positions, batch)
        normed: Tensor
        # Only each request's last token needs logits.
        normed, _ = self.norm(batch.last_tokens(hidden), batch.last_tokens(residual))
        return normed


class CausalLM(nn.Module):
    """``tp`` are the ranks that share the model: each has its part of the heads, the MLPs and the head."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, context_length: int, tp: Communicator | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.tp = tp = tp or Communicator()
        layers = (
            DecoderLayer(config, self.make_attention(i), self.make_mlp(i), dtype)
            for i in range(config.num_layers)
        )
        self.model = DecoderModel(config, layers, dtype, context_length)
        # A vocabulary that cannot be cut evenly is computed whole by each rank.
        self.head_tp = tp if config.vocab_size % tp.world_size == 0 else Communicator()
        self.lm_head = ColumnParallelLinear(config.hidden_size, config.vocab_size, dtype, self.head_tp)
        if config.tie_word_embeddings:
            rows = len(self.lm_head.weight)
            embedding = self.model.embed_tokens.weight.data
            self.lm_head.weight.data = embedding.narrow(0, self.head_tp.rank * rows, rows)
            self.lm_head.shares_weight = True

    @property
    def capturable(self) -> bool:
        """Return whether a decode step can be captured: False if a part of the model cannot."""
        return all(getattr(module, "capturable", True) for module in self.modules() if module is not self)

    def make_attention(self, layer_id: int) -> nn.Module:
        raise NotImplementedError

    def make_mlp(self, layer_id: int) -> nn.Module:
        config, moe = self.config, self.config.moe
        if moe is not None and layer_id not in moe.dense_layers:
            return MoEBlock(config.hidden_size, moe, self.dtype, self.tp)
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            self.dtype,
            self.tp,
            bias=config.mlp_bias,
            hidden_act=config.hidden_act,
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [batch_size, vocab_size] of each request's next token."""
        return self.compute_logits(self.model(batch))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits of each row of ``hidden``, on every rank."""
        return self.head_tp.all_gather(self.lm_head(hidden))

    def compile_layers(self, compiler: Any) -> None:
        """Compile each layer at its first call, for any number of tokens, by a backend of torch.compile."""
        for layer in self.model.layers:
            layer.compile(backend=compiler, dynamic=True)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """``weights`` under their Hugging Face names."""
        targets = weight_targets(self)
        if self.config.tie_word_embeddings:
            targets.pop("lm_head.weight")
        fill_weights(targets, weights, may_skip=self.may_skip)

    def may_skip(self, name: str) -> bool:
        """Older checkpoints carry tables that are computed here, and a tied head may be saved twice."""
        return name.endswith("rotary_emb.inv_freq") or (
            self.config.tie_word_embeddings and name == "lm_head.weight"
        )
