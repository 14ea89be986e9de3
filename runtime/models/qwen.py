"""Qwen2 and Qwen3: Llama with biases, or with norms of each head; Qwen3-MoE with experts."""

from __future__ import annotations

from torch import nn

from sgl_aspects.runtime.models.llama import LlamaForCausalLM
from sgl_aspects.runtime.models.moe import MoEBlock


class Qwen2ForCausalLM(LlamaForCausalLM):
    """The config says ``attention_bias`` without ``attention_output_bias``."""


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The config says ``qk_norm``."""


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    def make_mlp(self, layer_id: int) -> nn.Module:
        moe = self.config.moe
        if moe is None or layer_id in moe.dense_layers:
            return super().make_mlp(layer_id)
        return MoEBlock(self.config.hidden_size, moe, self.dtype, self.tp)
