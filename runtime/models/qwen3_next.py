"""Qwen3-Next: most layers have linear attention, by the gated delta rule, and every fourth gated attention.

A layer of linear attention keeps no keys and values, but for each request one state, whatever its length,
and the last few tokens before its convolution (:class:`~sgl_aspects.runtime.kv_cache.StatePool`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from sgl_aspects.errors import ConfigError
from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.attention.layer import Attention
from sgl_aspects.runtime.communicator import Communicator
from sgl_aspects.runtime.core import ForwardBatch
from sgl_aspects.runtime.kv_cache import StatePool
from sgl_aspects.runtime.loader.model_config import LinearAttentionConfig, ModelConfig
from sgl_aspects.runtime.loader.weights import Target
from sgl_aspects.runtime.models.decoder import CausalLM
from sgl_aspects.runtime.ops import GemmaRMSNorm, Linear, RMSNorm, RotaryEmbedding
from sgl_aspects.runtime.ops.base import parameter


class GatedAttention(nn.Module):
    """Grouped heads with norms, of which a part is rotated; the output goes through a gate."""

    def __init__(self, config: ModelConfig, kv_layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        size, heads, head_dim = config.hidden_size, config.num_heads, config.head_dim
        self.head_dim = head_dim
        self.q_proj = Linear(size, heads * head_dim * 2, dtype, bias=config.attention_bias)
        self.k_proj = Linear(size, config.num_kv_heads * head_dim, dtype, bias=config.attention_bias)
        self.v_proj = Linear(size, config.num_kv_heads * head_dim, dtype, bias=config.attention_bias)
        self.o_proj = Linear(heads * head_dim, size, dtype, bias=config.attention_output_bias)
        self.q_norm = GemmaRMSNorm(head_dim, config.rms_norm_eps, dtype)
        self.k_norm = GemmaRMSNorm(head_dim, config.rms_norm_eps, dtype)
        self.attention = Attention(kv_layer, heads, config.num_kv_heads, head_dim)

    def forward(
        self, hidden: Tensor, rotary: RotaryEmbedding, positions: Tensor, batch: ForwardBatch
    ) -> Tensor:
        tokens, head_dim = len(hidden), self.head_dim
        query, gate = self.q_proj(hidden).view(tokens, -1, 2 * head_dim).chunk(2, dim=-1)
        key = self.k_proj(hidden).view(tokens, -1, head_dim)
        value = self.v_proj(hidden).view(tokens, -1, head_dim)
        query = self.q_norm(query.reshape(-1, head_dim)).view(tokens, -1, head_dim)
        key = self.k_norm(key.reshape(-1, head_dim)).view(tokens, -1, head_dim)
        query, key = rotary(query, key, positions)
        attended = self.attention(query, key, value, batch) * gate.sigmoid()
        output: Tensor = self.o_proj(attended.reshape(tokens, -1))
        return output


class Convolution(nn.Module):
    """A convolution of each channel over its last ``kernel_size`` tokens."""

    def __init__(self, config: LinearAttentionConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(config.conv_dim, 1, config.kernel_size, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [requests, conv_dim, kernel_size - 1 + tokens] → [requests, conv_dim, tokens]."""
        return F.silu(F.conv1d(x, self.weight, groups=x.shape[1]))


class GatedDeltaNet(nn.Module):
    #: False: the length of each request's part is read on the host.
    capturable = False

    def __init__(
        self, config: ModelConfig, linear: LinearAttentionConfig, layer_id: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.linear = linear
        self.layer_id = layer_id
        values = linear.num_value_heads * linear.value_head_dim
        self.in_proj_qkvz = Linear(config.hidden_size, linear.conv_dim + values, dtype)
        self.in_proj_ba = Linear(config.hidden_size, 2 * linear.num_value_heads, dtype)
        self.conv1d = Convolution(linear, dtype)
        self.dt_bias = parameter(linear.num_value_heads, dtype=dtype)
        self.A_log = parameter(linear.num_value_heads, dtype=dtype)
        self.norm = RMSNorm(linear.value_head_dim, config.rms_norm_eps, dtype)
        self.out_proj = Linear(values, config.hidden_size, dtype)

    def forward(
        self, hidden: Tensor, rotary: RotaryEmbedding, positions: Tensor, batch: ForwardBatch
    ) -> Tensor:
        mixed, z, decay, rate = self._projected(hidden)
        decodes = batch.num_decodes
        outputs = []
        if decodes:
            part = slice(0, decodes)
            rows = batch.req_pool_indices[:decodes]
            outputs.append(self._decode(mixed[part], decay[part], rate[part], rows, batch))
        end = decodes
        for i in range(decodes, len(batch.lengths)):
            start, end = end, end + batch.num_new_tokens[i]
            part = slice(start, end)
            outputs.append(self._extend(mixed[part], decay[part], rate[part], i, batch))
        normed = self.norm(torch.cat(outputs).reshape(-1, self.linear.value_head_dim))
        gated = normed.float() * F.silu(z.reshape(normed.shape).float())
        output: Tensor = self.out_proj(gated.to(hidden.dtype).view(len(hidden), -1))
        return output

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[tokens, conv_dim], [tokens, value heads, value_head_dim], and g and beta [tokens, value heads].

        A checkpoint has the parts of each key head side by side: its query, key, values, gates.
        """
        linear, tokens = self.linear, len(hidden)
        shared = linear.num_value_heads // linear.num_key_heads
        values = shared * linear.value_head_dim
        parts = self.in_proj_qkvz(hidden).view(tokens, linear.num_key_heads, -1)
        sizes = [linear.key_head_dim, linear.key_head_dim, values, values]
        query, key, value, z = torch.split(parts, sizes, dim=-1)
        mixed = torch.cat([part.reshape(tokens, -1) for part in (query, key, value)], dim=-1)
        b, a = self.in_proj_ba(hidden).view(tokens, linear.num_key_heads, -1).split((shared, shared), dim=-1)
        decay = -self.A_log.float().exp() * F.softplus(a.reshape(tokens, -1).float() + self.dt_bias)
        z = z.reshape(tokens, linear.num_value_heads, linear.value_head_dim)
        return mixed, z, decay, b.reshape(tokens, -1).sigmoid()

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[requests, conv_dim, tokens] → query, key and value [requests, tokens, heads, dim]."""
        linear = self.linear
        keys = linear.num_key_heads * linear.key_head_dim
        sizes = [keys, keys, linear.num_value_heads * linear.value_head_dim]
        query, key, value = torch.split(convolved.transpose(1, 2), sizes, dim=-1)
        return (
            _split_heads(query, linear.key_head_dim),
            _split_heads(key, linear.key_head_dim),
            _split_heads(value, linear.value_head_dim),
        )

    def _states(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        states: StatePool | None = batch.attention_backend.states
        assert states is not None  # the runner makes them for every model with such layers
        return states.of_layer(self.layer_id)

    def _decode(
        self, mixed: Tensor, decay: Tensor, rate: Tensor, rows: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """One token of each request: [requests, value heads, value_head_dim]."""
        before, states = self._states(batch)
        joined = torch.cat((before[rows], mixed.unsqueeze(-1)), dim=-1)
        before[rows] = joined[..., 1:]
        query, key, value = self._heads(self.conv1d(joined))
        state = states[rows]
        output = dispatch.fused_recurrent_gated_delta_rule(
            query, key, value, decay.unsqueeze(1), rate.unsqueeze(1), state, use_qk_l2norm=True
        )
        states[rows] = state
        return output.squeeze(1)

    def _extend(self, mixed: Tensor, decay: Tensor, rate: Tensor, i: int, batch: ForwardBatch) -> Tensor:
        """The ``i``-th request's part of a prompt: [tokens, value heads, value_head_dim]."""
        before, states = self._states(batch)
        row = batch.req_pool_indices[i]
        is_first = batch.lengths[i] == batch.num_new_tokens[i]
        tail = torch.zeros_like(before[row]) if is_first else before[row]
        joined = torch.cat((tail, mixed.T), dim=-1).unsqueeze(0)
        before[row] = joined[0, :, -before.shape[-1] :]
        query, key, value = self._heads(self.conv1d(joined))
        output, state = dispatch.chunk_gated_delta_rule(
            query,
            key,
            value,
            decay.unsqueeze(0),
            rate.unsqueeze(0),
            None if is_first else states[row].unsqueeze(0),
            use_qk_l2norm=True,
        )
        states[row] = state.squeeze(0)
        return output.squeeze(0)

    def weight_targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        for name, own in self.named_parameters(recurse=False):
            yield prefix + name, Target(own.data)


def _split_heads(x: Tensor, head_dim: int) -> Tensor:
    """[..., heads * head_dim] → [..., heads, head_dim]."""
    return x.reshape(*x.shape[:-1], -1, head_dim)


class Qwen3NextForCausalLM(CausalLM):
    """The model, on one device: neither its states nor its gates are divided between ranks."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, context_length: int, tp: Communicator | None = None
    ) -> None:
        if tp is not None and tp.world_size > 1:
            raise ConfigError(f"tp_size={tp.world_size}: {config.architecture} runs on one device here")
        super().__init__(config, dtype, context_length, tp)

    def make_attention(self, layer_id: int) -> nn.Module:
        config, linear = self.config, self.config.linear
        assert linear is not None  # hf_config.py reads it for this architecture
        if layer_id in linear.layers:
            return GatedDeltaNet(config, linear, layer_id, self.dtype)
        kv_layer = layer_id - sum(1 for other in linear.layers if other < layer_id)
        return GatedAttention(config, kv_layer, self.dtype)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load ``weights``, with attention and shared experts renamed as in other models."""
        super().load_weights(
            (
                name.replace(".linear_attn.", ".self_attn.").replace(".shared_expert.", ".shared_experts."),
                tensor,
            )
            for name, tensor in weights
        )

    def may_skip(self, name: str) -> bool:
        """Layers that predict further tokens at once are not used."""
        return super().may_skip(name) or name.startswith("mtp.")
