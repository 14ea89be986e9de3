"""The interface of attention backends."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sgl_aspects.runtime.execution.forward_batch import ForwardBatch
    from sgl_aspects.runtime.kv_cache import PageTable, StatePool
    from sgl_aspects.runtime.ops.attention import Attention


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


class AttentionBackend(abc.ABC):
    """Computes attention of every layer over the paged cache. One object for an engine's life."""

    #: The kinds of key-value pool that it can read.
    kinds: ClassVar[frozenset[str]] = frozenset({"mha"})

    #: True where a decode step can be captured: values that change from step to step are then read only
    #: on the device (``batch.rows``, ``batch.device_lengths``).
    capturable: ClassVar[bool] = False

    #: True where a step reads slots of a request's pages that no token was written to yet, though masked:
    #: pages are cleared for it then, since NaN stays NaN under any mask.
    reads_unwritten_slots: ClassVar[bool] = True

    def __init__(self, kv_pool: Any, page_table: PageTable) -> None:
        #: State of layers without keys and values; None: the model has no such layers.
        self.states: StatePool | None = None
        self.kv_pool = kv_pool
        self.page_table = page_table

    @abc.abstractmethod
    def prepare(self, batch: ForwardBatch) -> None:
        """Called once a step, before the first layer: indices and masks that all layers share."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: Attention,
        batch: ForwardBatch,
        index: IndexerInputs | None = None,
    ) -> Tensor:
        """Store what this step's tokens add, then attend: [tokens, heads, v_head_dim].

        With ``index``, of a sparse layer: to the tokens that suit best.
        """
        self.kv_pool.set_kv_buffer(layer.layer_id, batch.slots, key, value)
        if index is not None:
            self.kv_pool.set_index_key_buffer(layer.layer_id, batch.slots, index.key)
            return self.forward_sparse(query, index, layer, batch)
        decodes = batch.num_decodes
        if decodes == len(batch.lengths):
            return self.forward_decode(query, layer, batch)
        if decodes == 0:
            return self.forward_extend(query, key, value, layer, batch)
        return torch.cat(
            (
                self.forward_decode(query[:decodes], layer, batch),
                self.forward_extend(query[decodes:], key[decodes:], value[decodes:], layer, batch),
            )
        )

    @abc.abstractmethod
    def forward_decode(self, query: Tensor, layer: Attention, batch: ForwardBatch) -> Tensor:
        """Return attention of ``query``, one token of each decoding request, over its cached tokens."""

    @abc.abstractmethod
    def forward_extend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: Attention, batch: ForwardBatch
    ) -> Tensor:
        """Return attention of the prompts' tokens: each over its request's cached tokens, up to itself."""

    def forward_sparse(
        self, query: Tensor, index: IndexerInputs, layer: Attention, batch: ForwardBatch
    ) -> Tensor:
        """Return attention of all tokens, each over the best ones of its request. Only for kind "dsa"."""
        raise NotImplementedError(
            f"{type(self).__qualname__} has no sparse attention: write forward_sparse()"
        )
