"""Attention of one layer: the place where a model meets the attention backend and the KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from sgl_aspects.runtime.attention.base import IndexerInputs
    from sgl_aspects.runtime.core import ForwardBatch


class Attention(nn.Module):
    """Causal attention with grouped heads. The backend computes it; this holds the layer's sizes, under the
    names of SGLang's layers.

    ``v_head_dim`` is that of values and output, by default the ``head_dim`` of queries and keys.
    """

    #: What attention backends may ask of a layer of SGLang, and no layer here has.
    logit_cap = 0.0
    sliding_window_size = -1
    is_cross_attention = False
    attn_type = "decoder"
    k_scale = v_scale = None

    def __init__(
        self,
        layer_id: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        v_head_dim: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.tp_q_head_num = num_heads
        self.tp_k_head_num = self.tp_v_head_num = num_kv_heads
        self.head_dim = self.qk_head_dim = head_dim
        self.v_head_dim = v_head_dim or head_dim
        self.scaling = scale or head_dim**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch: ForwardBatch,
        index: IndexerInputs | None = None,
    ) -> Tensor:
        """query [tokens, heads, head_dim], key [tokens, kv_heads, head_dim], value [tokens, kv_heads,
        v_head_dim] → [tokens, heads, v_head_dim]. With ``index``: over the tokens that it finds best."""
        more: dict[str, Any] = {} if index is None else {"index": index}
        output: Tensor = batch.attention_backend.forward(query.flatten(1), key, value, self, batch, **more)
        return output.view(-1, self.tp_q_head_num, self.v_head_dim)
