"""The kernels of triton_backend.py, which describes how they work together."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_splits(
    query,
    new_keys,
    new_others,
    keys,
    others,
    table,
    rows,
    lengths,
    parts,
    weights,
    scale,
    new_key_request_stride,
    new_key_head_stride,
    new_other_request_stride,
    new_other_head_stride,
    key_slot_stride,
    key_head_stride,
    other_slot_stride,
    other_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,
    DIM: tl.constexpr,
    OTHER_DIM: tl.constexpr,
    COMPRESSED: tl.constexpr,
    STORES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One split of one request and key-value head: up to BLOCK_HEADS of its group over the split's tokens.

    A token is DIM numbers in ``keys`` and OTHER_DIM in ``others``: key and value, or COMPRESSED, where the
    first are value and key at once, and the others the rest of the key.
    """
    request, kv_head, split = tl.program_id(0), tl.program_id(1) // HEAD_BLOCKS, tl.program_id(2)
    head_block = tl.program_id(1) % HEAD_BLOCKS
    length = tl.load(lengths + request)
    newest = length - 1 if STORES else length
    # Whole blocks of tokens, evenly: later splits of a short request stay empty.
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_TOKENS) * BLOCK_TOKENS
    start = split * share
    end = tl.minimum(start + share, length)
    old_end = tl.minimum(end, newest)
    dims, other_dims = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_OTHER)
    in_dim, in_other = dims < DIM, other_dims < OTHER_DIM
    row = table + tl.load(rows + request) * table_stride
    keys += kv_head * key_head_stride
    others += kv_head * other_head_stride
    # Read before the wait: tokens that earlier steps stored, and lengths and slots, which are written before
    # the first layer begins. The newest token is read after it.
    if OVERLAP and not STORES:
        tl.extra.cuda.gdc_wait()
    tokens = start + tl.arange(0, BLOCK_TOKENS)
    slots = _slots_of(row, tokens, old_end)
    key = _read(keys + slots * key_slot_stride, tokens < old_end, dims, in_dim)
    other = _read(others + slots * other_slot_stride, tokens < old_end, other_dims, in_other)
    tokens += BLOCK_TOKENS
    slots = _slots_of(row, tokens, old_end)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    members = head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_member = members < GROUP
    place = (request * (tl.num_programs(1) // HEAD_BLOCKS) + kv_head) * GROUP + members
    width = DIM + OTHER_DIM if COMPRESSED else DIM
    q = _read(query + place * width, is_member, dims, in_dim)
    if COMPRESSED:
        q_other = _read(query + place * width + DIM, is_member, other_dims, in_other)
    if STORES:
        new_keys += request * new_key_request_stride + kv_head * new_key_head_stride
        new_others += request * new_other_request_stride + kv_head * new_other_head_stride
        new_key = tl.load(new_keys + dims, mask=in_dim, other=0.0)
        new_other = tl.load(new_others + other_dims, mask=in_other, other=0.0)
        if (start < end) & (end == length) & (head_block == 0):  # the newest token is of this split
            slot = tl.load(row + newest).to(tl.int64)
            tl.store(keys + slot * key_slot_stride + dims, new_key, mask=in_dim)
            tl.store(others + slot * other_slot_stride + other_dims, new_other, mask=in_other)
    largest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    output = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
    for first in range(start, end, BLOCK_TOKENS):
        # Prefetch the next block while this one is computed.
        next_key = _read(keys + slots * key_slot_stride, tokens < old_end, dims, in_dim)
        next_other = _read(others + slots * other_slot_stride, tokens < old_end, other_dims, in_other)
        tokens += BLOCK_TOKENS
        slots = _slots_of(row, tokens, old_end)
        present = first + tl.arange(0, BLOCK_TOKENS)
        if STORES:
            is_newest = (present == newest)[:, None]
            key = tl.where(is_newest, new_key[None, :], key)
            other = tl.where(is_newest, new_other[None, :], other)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        if COMPRESSED:
            scores = tl.dot(q_other, tl.trans(other), scores, input_precision="ieee")
            value = key
        else:
            value = other
        scores = tl.where((present < end)[None, :], scores * scale, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shares = tl.exp(scores - new_largest[:, None])
        shrink = tl.exp(largest - new_largest)
        total = total * shrink + tl.sum(shares, 1)
        output = output * shrink[:, None] + tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        largest = new_largest
        key = next_key
        other = next_other
    place = place * SPLITS + split
    is_full = end > start
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(
        parts + place[:, None] * DIM + dims[None, :],
        tl.where(is_full, output / divisor[:, None], 0.0),
        mask=is_member[:, None] & in_dim[None, :],
    )
    weight = tl.where(is_full, largest + tl.log(divisor), float("-inf"))
    tl.store(weights + place, weight, mask=is_member)


@triton.jit
def _slots_of(row, tokens, end):
    """Return the addresses of the tokens at these positions of a row, before ``end``."""
    return tl.load(row + tokens, tokens < end, 0).to(tl.int64)


@triton.jit
def _read(rows, is_row, columns, is_column):
    """[rows, columns] of numbers: zeros where there is no row or no column."""
    return tl.load(rows[:, None] + columns[None, :], is_row[:, None] & is_column[None, :], 0.0)


@triton.jit
def join_splits(
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
