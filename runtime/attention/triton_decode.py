"""The kernels of triton_backend.py, which says how they go together."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decode_splits(
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
    HEAD_BLOCKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    REST_DIM: tl.constexpr,
    STORES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One split of one request and key-value head: up to BLOCK_HEADS of its group over the split's tokens."""
    request, kv_head, split = tl.program_id(0), tl.program_id(1) // HEAD_BLOCKS, tl.program_id(2)
    head_block = tl.program_id(1) % HEAD_BLOCKS
    length = tl.load(lengths + request)
    newest = length - 1 if STORES else length
    # Whole blocks of tokens, evenly: later splits of a short request stay empty.
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_TOKENS) * BLOCK_TOKENS
    start = split * share
    end = tl.minimum(start + share, length)
    dims = tl.arange(0, BLOCK_DIM)
    in_dim = dims < VALUE_DIM
    rest_dims = VALUE_DIM + tl.arange(0, BLOCK_REST)
    in_rest = rest_dims < VALUE_DIM + REST_DIM
    pages = table + tl.load(rows + request) * table_stride
    keys += kv_head * key_head_stride
    values += kv_head * value_head_stride
    # Read before the wait: what earlier steps stored, and lengths and pages, which are written before the
    # first layer begins. The newest token is yet to come.
    if OVERLAP and not STORES:
        tl.extra.cuda.gdc_wait()
    tokens = start + tl.arange(0, BLOCK_TOKENS)
    old = tokens < tl.minimum(end, newest)
    slots = _slots_of(pages, tokens, old, PAGE_SIZE)[:, None]
    key = tl.load(keys + slots * key_slot_stride + dims[None, :], old[:, None] & in_dim[None, :], 0.0)
    if REST_DIM:
        rest = tl.load(
            keys + slots * key_slot_stride + rest_dims[None, :], old[:, None] & in_rest[None, :], 0.0
        )
    else:
        value = tl.load(
            values + slots * value_slot_stride + dims[None, :], old[:, None] & in_dim[None, :], 0.0
        )
    tokens += BLOCK_TOKENS
    old = tokens < tl.minimum(end, newest)
    slots = _slots_of(pages, tokens, old, PAGE_SIZE)[:, None]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    members = head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_member = (members < GROUP)[:, None]
    heads = kv_head * GROUP + members
    asking = query + request * query_request_stride + heads[:, None] * query_head_stride
    asked = tl.load(asking + dims[None, :], is_member & in_dim[None, :], 0.0)
    if REST_DIM:
        asked_rest = tl.load(asking + rest_dims[None, :], is_member & in_rest[None, :], 0.0)
    if STORES:
        new_keys += request * new_key_request_stride + kv_head * new_key_head_stride
        new_values += request * new_value_request_stride + kv_head * new_value_head_stride
        new_key = tl.load(new_keys + dims, mask=in_dim, other=0.0)
        if REST_DIM:
            new_rest = tl.load(new_keys + rest_dims, mask=in_rest, other=0.0)
        else:
            new_value = tl.load(new_values + dims, mask=in_dim, other=0.0)
        if (start < end) & (end == length) & (head_block == 0):  # the newest token is of this split
            slot = tl.load(pages + newest // PAGE_SIZE) * PAGE_SIZE + newest % PAGE_SIZE
            tl.store(keys + slot * key_slot_stride + dims, new_key, mask=in_dim)
            if REST_DIM:
                tl.store(keys + slot * key_slot_stride + rest_dims, new_rest, mask=in_rest)
            else:
                tl.store(values + slot * value_slot_stride + dims, new_value, mask=in_dim)
    largest = tl.full([BLOCK_HEADS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    output = tl.zeros([BLOCK_HEADS, BLOCK_DIM], tl.float32)
    for first in range(start, end, BLOCK_TOKENS):
        # What the next round looks at is under way while this one computes.
        next_key = tl.load(
            keys + slots * key_slot_stride + dims[None, :], old[:, None] & in_dim[None, :], 0.0
        )
        if REST_DIM:
            next_rest = tl.load(
                keys + slots * key_slot_stride + rest_dims[None, :], old[:, None] & in_rest[None, :], 0.0
            )
        else:
            next_value = tl.load(
                values + slots * value_slot_stride + dims[None, :], old[:, None] & in_dim[None, :], 0.0
            )
        tokens += BLOCK_TOKENS
        old = tokens < tl.minimum(end, newest)
        slots = _slots_of(pages, tokens, old, PAGE_SIZE)[:, None]
        present = first + tl.arange(0, BLOCK_TOKENS)
        if STORES:
            is_newest = (present == newest)[:, None]
            key = tl.where(is_newest, new_key[None, :], key)
            if REST_DIM:
                rest = tl.where(is_newest, new_rest[None, :], rest)
            else:
                value = tl.where(is_newest, new_value[None, :], value)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee")
        if REST_DIM:
            scores = tl.dot(asked_rest, tl.trans(rest), scores, input_precision="ieee")
            value = key
        scores = tl.where((present < end)[None, :], scores * scale, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shares = tl.exp(scores - new_largest[:, None])
        shrink = tl.exp(largest - new_largest)
        total = total * shrink + tl.sum(shares, 1)
        output = output * shrink[:, None] + tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        largest = new_largest
        key = next_key
        if REST_DIM:
            rest = next_rest
        else:
            value = next_value
    place = (request * (tl.num_programs(1) // HEAD_BLOCKS) * GROUP + heads) * SPLITS + split
    is_full = end > start
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(
        parts + place[:, None] * VALUE_DIM + dims[None, :],
        tl.where(is_full, output / divisor[:, None], 0.0),
        mask=is_member & in_dim[None, :],
    )
    weight = tl.where(is_full, largest + tl.log(divisor), float("-inf"))
    tl.store(weights + place, weight, mask=members < GROUP)


@triton.jit
def _slots_of(pages, tokens, inside, PAGE_SIZE: tl.constexpr):
    """Where the tokens at these positions of a row live."""
    return tl.load(pages + tokens // PAGE_SIZE, inside, 0) * PAGE_SIZE + tokens % PAGE_SIZE


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


@triton.jit
def index_scores(
    query,
    weights,
    keys,
    table,
    rows,
    lengths,
    fitness,
    scale,
    tokens_at_most,
    key_slot_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """How well a block of one request's tokens suits its query: the formula of IndexerInputs."""
    request = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + request)
    tokens = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    scores = tl.full([BLOCK_TOKENS], float("-inf"), tl.float32)
    if tl.program_id(1) * BLOCK_TOKENS < length:
        heads, dims = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_DIM)
        is_head, in_dim = heads < HEADS, dims < DIM
        pages = table + tl.load(rows + request) * table_stride
        slots = _slots_of(pages, tokens, tokens < length, PAGE_SIZE)
        key = tl.load(
            keys + slots[:, None] * key_slot_stride + dims[None, :],
            (tokens < length)[:, None] & in_dim[None, :],
            0.0,
        )
        asking = query + (request * HEADS + heads[:, None]) * DIM + dims[None, :]
        asked = tl.load(asking, is_head[:, None] & in_dim[None, :], 0.0)
        weight = tl.load(weights + request * HEADS + heads, is_head, 0.0)
        each = tl.maximum(tl.dot(asked, tl.trans(key), input_precision="ieee") * scale, 0.0)
        scores = tl.where(tokens < length, tl.sum(each * weight[:, None], 0), scores)
    tl.store(fitness + request * tokens_at_most + tokens, scores, mask=tokens < tokens_at_most)
