"""Attention for GPUs: decoding in Triton, over pages where they lie; prompts with PyTorch's kernels.

A decoding request reads all its keys and values for one token, so the whole device must be kept reading.
Each request and key-value head is cut into splits of its tokens, and the splits are combined:

    request 0, head 0   │ split 0 │ split 1 │ split 2 │      each gives its part of the output and the
    request 0, head 1   │ split 0 │ split 1 │ split 2 │      logarithm of its weight: decode_splits
    request 1, head 0   │ split 0 │ split 1 │ (empty) │      their weighted sum: join_splits

How many splits there are depends on the number of requests alone, and lengths are read on the device: the
same launch serves every step, as a captured graph needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import triton
from torch import Tensor

from sgl_aspects.runtime.attention.torch_native import TorchNativeBackend
from sgl_aspects.runtime.attention.triton_decode import decode_splits, join_splits
from sgl_aspects.runtime.dispatch.triton import overlapping

if TYPE_CHECKING:
    from sgl_aspects.runtime.attention.base import Attention
    from sgl_aspects.runtime.core import ForwardBatch

#: This number of programs, each with few tokens, keeps a device of about 130 multiprocessors reading.
_PROGRAMS = 1024
_MAX_SPLITS = 32
#: Tokens that a program processes together, and heads of a group.
_BLOCK_TOKENS = 16
_BLOCK_HEADS = 16


class TritonBackend(TorchNativeBackend):
    """Needs a device that Triton compiles for, and pools whose rows are [slots, heads, head_dim] views."""

    #: Sparse attention is the reference's.
    kinds: ClassVar[frozenset[str]] = frozenset({"mha", "mla"})
    capturable: ClassVar[bool] = True
    reads_unwritten_slots: ClassVar[bool] = False

    def _prepare_decodes(self, batch: ForwardBatch) -> None:
        #: [requests]: each decoding one's row of ``req_to_token``, and its tokens in there.
        self._rows, self._lengths = (
            each[: batch.num_decodes] for each in (batch.req_pool_indices, batch.seq_lens)
        )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: Attention, batch: ForwardBatch, saves: bool
    ) -> Tensor:
        """Attend like any backend; the kernel that reads the new tokens of decoding requests also stores
        them.
        """
        decodes = batch.num_decodes
        if decodes == 0:
            return super()._attend(query, key, value, layer, batch, saves)
        decoded = self._decode(query, (key, value) if saves else None, layer)
        if decodes == len(batch.lengths):
            return decoded
        prompts = query[decodes:], key[decodes:], value[decodes:]
        if saves:
            self.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc[decodes:], *prompts[1:])
        return torch.cat((decoded, self._prompts(*prompts, layer)))

    def _decode(self, query: Tensor, new: tuple[Tensor, Tensor] | None, layer: Attention) -> Tensor:
        """Attend from the first tokens of ``query``, one per request. Their keys and values are ``new``, and
        stored here; None if they are in the pool.
        """
        requests, dim = len(self._lengths), layer.v_head_dim
        table = self.req_to_token_pool.req_to_token
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        others = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        new_keys, new_others = (keys, others) if new is None else new
        compressed = layer.head_dim > dim
        if compressed:  # a row is a key whose first numbers are the value: the others are looked at apart
            others, new_others = keys[..., dim:], new_keys[..., dim:]
        group = layer.tp_q_head_num // layer.tp_k_head_num
        head_blocks = triton.cdiv(group, _BLOCK_HEADS)
        splits = max(1, min(_MAX_SPLITS, _PROGRAMS // (requests * layer.tp_k_head_num * head_blocks)))
        shape = requests, layer.tp_q_head_num, splits
        parts = torch.empty(*shape, dim, dtype=torch.float32, device=query.device)
        weights = torch.empty(shape, dtype=torch.float32, device=query.device)
        block_dim = max(16, triton.next_power_of_2(dim))
        decode_splits[(requests, layer.tp_k_head_num * head_blocks, splits)](
            query.contiguous(),
            new_keys,
            new_others,
            keys,
            others,
            table,
            self._rows,
            self._lengths,
            parts,
            weights,
            layer.scaling,
            *(size for each in (new_keys, new_others, keys, others) for size in each.stride()[:2]),
            table.stride(0),
            GROUP=group,
            HEAD_BLOCKS=head_blocks,
            DIM=dim,
            OTHER_DIM=others.shape[2],
            COMPRESSED=compressed,
            STORES=new is not None,
            BLOCK_HEADS=_BLOCK_HEADS,
            BLOCK_DIM=block_dim,
            BLOCK_OTHER=max(16, triton.next_power_of_2(others.shape[2])),
            BLOCK_TOKENS=_BLOCK_TOKENS,
            SPLITS=splits,
            num_warps=min(8, max(1, block_dim // 64)),
            **overlapping(),
        )
        output = torch.empty(requests, layer.tp_q_head_num, dim, dtype=query.dtype, device=query.device)
        join_splits[shape[:2]](
            parts,
            weights,
            output,
            HEAD_DIM=dim,
            BLOCK_DIM=block_dim,
            SPLITS=splits,
            BLOCK_SPLITS=triton.next_power_of_2(splits),
            num_warps=1 if block_dim <= 128 else 4,
            **overlapping(),
        )
        return output
