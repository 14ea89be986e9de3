"""Attention of one layer, and the interface of the backends that compute it over the KV cache."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

if TYPE_CHECKING:
    from sgl_aspects.runtime.core import ForwardBatch
    from sgl_aspects.runtime.kv_cache import ReqToTokenPool


@dataclass
class IndexerInputs:
    """A sparse layer's indexer outputs for this step's tokens.

    A token at l suits the query of a token t by ``Σ_h weights[t, h] * relu(scale * query[t, h] · key[l])``,
    where scale is the head size to the power of -0.5. Attention reads the ``topk`` that suit best.
    """

    #: [tokens, index heads, index head_dim]
    query: Tensor
    #: [tokens, index head_dim]
    key: Tensor
    #: [tokens, index heads]
    weights: Tensor
    topk: int


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


class AttentionBackend(abc.ABC):
    """Computes attention of every layer over the paged cache, with the methods of SGLang's backends.

    One object for an engine's life, made with the model runner, of which it may use
    ``req_to_token_pool.req_to_token`` [rows, tokens], int32, the slot of each token of a request;
    ``token_to_kv_pool``, ``device``, ``dtype`` and ``page_size``.
    """

    #: The kinds of key-value pool that it can read.
    kinds: ClassVar[frozenset[str]] = frozenset({"mha"})

    #: True where a decode step can be captured: values that change from step to step are then read only
    #: on the device (``forward_batch.req_pool_indices``, ``forward_batch.seq_lens``).
    capturable: ClassVar[bool] = False

    #: True where a step reads slots of a request's pages that no token was written to yet, though masked:
    #: pages are cleared for it then, since NaN stays NaN under any mask.
    reads_unwritten_slots: ClassVar[bool] = True

    def __init__(self, model_runner: Any) -> None:
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool: ReqToTokenPool = model_runner.req_to_token_pool

    @abc.abstractmethod
    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Called once a step, before the first layer: indices and masks that all layers share."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Attention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Store what this step's tokens add, then attend.

        ``q`` [tokens, heads * head_dim], ``k`` [tokens, kv_heads, head_dim], ``v`` [tokens, kv_heads,
        v_head_dim] → [tokens, heads * v_head_dim]. ``kwargs``: ``index``, :class:`IndexerInputs`, for layers
        of sparse attention.
        """
        decodes = forward_batch.forward_mode.is_decode()
        work: Callable[..., Tensor] = self.forward_decode if decodes else self.forward_extend
        return work(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    @abc.abstractmethod
    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Attention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """A step in which each request has one token: attend over its tokens in the cache and itself."""

    @abc.abstractmethod
    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Attention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> Tensor:
        """A step with prompts, chunks of them, and requests with one token beside them: each token attends
        over its request's tokens in the cache, up to itself.
        """
