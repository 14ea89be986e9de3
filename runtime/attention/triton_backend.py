"""Attention for GPUs: decoding in Triton, over pages where they lie; prompts with PyTorch's kernels.

A decoding request reads all its keys and values for one token, so what counts is that the whole device
reads. Each request and key-value head is cut into splits of its tokens, and the splits are put together:

    request 0, head 0   │ split 0 │ split 1 │ split 2 │      each gives its part of the output and the
    request 0, head 1   │ split 0 │ split 1 │ split 2 │      logarithm of its weight: _decode_splits
    request 1, head 0   │ split 0 │ split 1 │ (empty) │      their weighted sum: _join_splits

How many splits there are depends on the number of requests alone, and lengths are read on the device: the
same launch serves every step, as a captured graph needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import triton
import triton.language as tl

from sgl_aspects.runtime.attention.torch_native import TorchNativeBackend
from sgl_aspects.runtime.ops.triton_kernels import overlapping

if TYPE_CHECKING:
    from sgl_aspects.runtime.forward_batch import ForwardBatch
    from sgl_aspects.runtime.ops.attention import Attention

#: So many programs, each with few tokens, keep a device of about 130 multiprocessors reading.
_PROGRAMS = 512
_MAX_SPLITS = 16
#: Tokens that a program looks at together.
_BLOCK_TOKENS = 64


class TritonBackend(TorchNativeBackend):
    """Needs a device that Triton compiles for, and pools whose rows are [slots, heads, head_dim] views."""

    kinds: ClassVar[frozenset[str]] = frozenset({"mha"})
    capturable: ClassVar[bool] = True

    def prepare(self, batch: ForwardBatch) -> None:
        super().prepare(batch)
        self._lengths = batch.device_lengths[: batch.num_decodes]

    def _decode_step(self, batch: ForwardBatch) -> Any:
        """Nothing: the kernels read the page table themselves."""
        return None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: Attention,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """As of any backend, but what decoding requests add is stored by the kernel that reads it."""
        decodes = batch.num_decodes
        if decodes == len(batch.lengths):
            return self._decode_pages(query, key, value, layer, batch)
        prompts = query[decodes:], key[decodes:], value[decodes:]
        self.kv_pool.set_kv_buffer(layer.layer_id, batch.slots[decodes:], *prompts[1:])
        extended = self.forward_extend(*prompts, layer, batch)
        if not decodes:
            return extended
        decoded = self._decode_pages(query[:decodes], key[:decodes], value[:decodes], layer, batch)
        return torch.cat((decoded, extended))

    def _decode_pages(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: Attention,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        requests, heads, head_dim = query.shape
        group = heads // layer.num_kv_heads
        keys = self.kv_pool.get_key_buffer(layer.layer_id)
        values = self.kv_pool.get_value_buffer(layer.layer_id)
        splits = max(1, min(_MAX_SPLITS, _PROGRAMS // (requests * layer.num_kv_heads)))
        parts = torch.empty(requests, heads, splits, head_dim, dtype=torch.float32, device=query.device)
        weights = torch.empty(requests, heads, splits, dtype=torch.float32, device=query.device)
        table = self.page_table.table
        block_dim = triton.next_power_of_2(head_dim)
        _decode_splits[(requests, layer.num_kv_heads, splits)](
            query,
            key,
            value,
            keys,
            values,
            table,
            batch.rows,
            self._lengths,
            parts,
            weights,
            layer.scale,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            keys.stride(0),
            keys.stride(1),
            values.stride(0),
            values.stride(1),
            table.stride(0),
            PAGE_SIZE=self.page_table.page_size,
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
            BLOCK_DIM=max(16, block_dim),
            BLOCK_TOKENS=_BLOCK_TOKENS,
            SPLITS=splits,
            num_warps=4,
            **overlapping(),
        )
        output = torch.empty(requests, heads, head_dim, dtype=query.dtype, device=query.device)
        _join_splits[(requests, heads)](
            parts,
            weights,
            output,
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim,
            SPLITS=splits,
            BLOCK_SPLITS=triton.next_power_of_2(splits),
            num_warps=1,
            **overlapping(),
        )
        return output


@triton.jit
def _decode_splits(
    query,
    new_keys,
    new_values,
    keys,
    values,
    table,
    rows,
    lengths,
    parts,
    weights,
    scale,
    query_request_stride,
    query_head_stride,
    new_key_request_stride,
    new_key_head_stride,
    new_value_request_stride,
    new_value_head_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One split of one request and key-value head: the heads of its group over the split's tokens."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + request)
    newest = length - 1
    # Whole blocks of tokens, evenly: later splits of a short request stay empty.
    blocks = tl.cdiv(tl.cdiv(length, BLOCK_TOKENS), SPLITS)
    start = split * blocks * BLOCK_TOKENS
    end = tl.minimum(start + blocks * BLOCK_TOKENS, length)
    dims = tl.arange(0, BLOCK_DIM)
    in_dim = dims < HEAD_DIM
    pages = table + tl.load(rows + request) * table_stride
    keys += kv_head * key_head_stride + dims
    values += kv_head * value_head_stride + dims
    tokens = start + tl.arange(0, BLOCK_TOKENS)
    # Read before the wait: what earlier steps stored, and lengths and pages, which are written before the
    # first layer begins. The newest token is yet to come.
    old = (tokens < end) & (tokens < newest)
    slots = _slots_of(pages, tokens, old, PAGE_SIZE)
    key = tl.load(keys + slots[:, None] * key_slot_stride, old[:, None] & in_dim[None, :], 0.0)
    value = tl.load(values + slots[:, None] * value_slot_stride, old[:, None] & in_dim[None, :], 0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    members = tl.arange(0, BLOCK_GROUP)
    heads = kv_head * GROUP + members
    is_head = (members < GROUP)[:, None] & in_dim[None, :]
    asked = tl.load(
        query + request * query_request_stride + heads[:, None] * query_head_stride + dims[None, :],
        mask=is_head,
        other=0.0,
    )
    new_keys += request * new_key_request_stride + kv_head * new_key_head_stride
    new_values += request * new_value_request_stride + kv_head * new_value_head_stride
    new_key = tl.load(new_keys + dims, mask=in_dim, other=0.0)
    new_value = tl.load(new_values + dims, mask=in_dim, other=0.0)
    if (start < end) & (end == length):  # the newest token is of this split
        slot = tl.load(pages + newest // PAGE_SIZE) * PAGE_SIZE + newest % PAGE_SIZE
        tl.store(keys + slot * key_slot_stride, new_key, mask=in_dim)
        tl.store(values + slot * value_slot_stride, new_value, mask=in_dim)
    largest = tl.full([BLOCK_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    output = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for first in range(start, end, BLOCK_TOKENS):
        tokens = first + tl.arange(0, BLOCK_TOKENS)
        is_newest = (tokens == newest)[:, None]
        key = tl.where(is_newest, new_key[None, :], key)
        value = tl.where(is_newest, new_value[None, :], value)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where((tokens < end)[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shares = tl.exp(scores - new_largest[:, None])
        shrink = tl.exp(largest - new_largest)
        total = total * shrink + tl.sum(shares, 1)
        output = output * shrink[:, None] + tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        largest = new_largest
        tokens += BLOCK_TOKENS
        old = (tokens < end) & (tokens < newest)
        slots = _slots_of(pages, tokens, old, PAGE_SIZE)
        key = tl.load(keys + slots[:, None] * key_slot_stride, old[:, None] & in_dim[None, :], 0.0)
        value = tl.load(values + slots[:, None] * value_slot_stride, old[:, None] & in_dim[None, :], 0.0)
    place = (request * tl.num_programs(1) * GROUP + heads) * SPLITS + split
    is_full = end > start
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(
        parts + place[:, None] * HEAD_DIM + dims[None, :],
        tl.where(is_full, output / divisor[:, None], 0.0),
        mask=is_head,
    )
    weight = tl.where(is_full, largest + tl.log(divisor), float("-inf"))
    tl.store(weights + place, weight, mask=members < GROUP)


@triton.jit
def _slots_of(pages, tokens, inside, PAGE_SIZE: tl.constexpr):
    """Where the tokens at these positions of a row live."""
    return tl.load(pages + tokens // PAGE_SIZE, inside, 0) * PAGE_SIZE + tokens % PAGE_SIZE


@triton.jit
def _join_splits(
    parts,
    weights,
    output,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The output of one request and head: its splits by their weights. The first split is never empty."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    splits = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_DIM)
    weight = tl.load(weights + place * SPLITS + splits, mask=splits < SPLITS, other=float("-inf"))
    share = tl.exp(weight - tl.max(weight, 0))
    part = tl.load(
        parts + (place * SPLITS + splits[:, None]) * HEAD_DIM + dims[None, :],
        mask=(splits < SPLITS)[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    joined = tl.sum(part * share[:, None], 0) / tl.sum(share, 0)
    tl.store(output + place * HEAD_DIM + dims, joined.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
