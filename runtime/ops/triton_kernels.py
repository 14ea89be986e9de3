"""Operators for GPUs in Triton: what PyTorch does in several launches, in one.

Each function computes what ``forward_native`` of its operator does, for any number of tokens.

Where the GPU can (Hopper and later), a kernel starts while the one before it still runs: it fetches weights,
which nobody writes, and only then waits for its input. Every kernel here waits before it reads or writes
anything that another kernel touches.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

#: Up to so many tokens a product is a matter of reading the weight once, and this file's kernel reads faster.
SKINNY_TOKENS = 16


@cache
def overlapping() -> dict[str, bool]:
    """Launch options of kernels that start early and wait inside."""
    if triton.knobs.runtime.interpret:
        return {"OVERLAP": False}
    target = triton.runtime.driver.active.get_current_target()
    early = target.backend == "cuda" and target.arch >= 90
    return {"OVERLAP": True, "launch_pdl": True} if early else {"OVERLAP": False}


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """[..., size] normalized; with ``residual`` (normalized sum, sum)."""
    size = x.shape[-1]
    x = x.contiguous()
    output = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    _rms_norm[(x.numel() // size,)](
        x,
        x if residual is None else residual.contiguous(),
        weight,
        output,
        total,
        eps,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        HAS_RESIDUAL=residual is not None,
        num_warps=4 if size <= 2048 else 8,
        **overlapping(),
    )
    return output if residual is None else (output, total)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """[..., 2 n] → [..., n]."""
    size = x.shape[-1] // 2
    x = x.contiguous()
    output = torch.empty(*x.shape[:-1], size, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(size))
    _silu_and_mul[(output.numel() // size, triton.cdiv(size, block))](
        x, output, SIZE=size, BLOCK=block, **overlapping()
    )
    return output


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [tokens, heads, dim], key [tokens, kv_heads, dim]; cos, signed sin [tokens, 1, dim]."""
    tokens, heads, dim = query.shape
    kv_heads = key.shape[1]
    new_query = torch.empty(tokens, heads, dim, dtype=query.dtype, device=query.device)
    new_key = torch.empty(tokens, kv_heads, dim, dtype=key.dtype, device=key.device)
    _rotate[(tokens, heads + kv_heads)](
        query,
        key,
        cos,
        sin,
        new_query,
        new_key,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        heads,
        kv_heads,
        DIM=dim,
        BLOCK=triton.next_power_of_2(dim),
        num_warps=1,
        **overlapping(),
    )
    return new_query, new_key


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [tokens, inner] with at most SKINNY_TOKENS tokens, weight [outer, inner]: [tokens, outer]."""
    tokens, inner = x.shape
    outer = weight.shape[0]
    output = torch.empty(tokens, outer, dtype=x.dtype, device=x.device)
    tiles = _tiles(tokens, outer, inner)
    arguments = (x.contiguous(), weight, weight if bias is None else bias, output, outer, tokens)
    kernel = _row_times_weight if tokens == 1 else _rows_times_weight
    kernel[(triton.cdiv(outer, tiles["BLOCK_OUTER"]),)](
        *arguments, INNER=inner, HAS_BIAS=bias is not None, BLOCK_TOKENS=16, **tiles, **overlapping()
    )
    return output


def _tiles(tokens: int, outer: int, inner: int) -> dict[str, int]:
    """Rows of the weight that a program takes, columns that it reads before it waits and at a time after.

    Measured on an H100 in whole decode steps.
    """
    if tokens == 1:
        tiles = (2, 2048, 2048, 8 if inner > 4096 else 4, 3)
    elif outer > 8192:
        tiles = (32, 128, 128, 2, 5)
    elif inner > 4096 or outer <= 2048:
        tiles = (16, 512, 512, 2, 4)
    else:
        tiles = (32, 2048, 256, 8, 3)
    names = ("BLOCK_OUTER", "BLOCK_FIRST", "BLOCK_INNER", "num_warps", "num_stages")
    named = dict(zip(names, tiles))
    named["BLOCK_FIRST"] = min(named["BLOCK_FIRST"], triton.next_power_of_2(inner))
    return named


@triton.jit
def _rms_norm(
    x,
    residual,
    weight,
    output,
    total,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    exact = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        # Rounded as the sum that is handed on: both are of the same numbers.
        exact += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
        rounded = exact.to(total.dtype.element_ty)
        tl.store(total + places, rounded, mask=inside)
        exact = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 0) / SIZE + eps)
    tl.store(output + places, (exact * scale * factors).to(output.dtype.element_ty), mask=inside)


@triton.jit
def _silu_and_mul(x, output, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gate = tl.load(x + token * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + token * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + token * SIZE + columns, (active * up).to(output.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    query,
    key,
    cos,
    sin,
    new_query,
    new_key,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    heads,
    kv_heads,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One head of one token: the query's heads first, then the key's."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    inside = dims < DIM
    swapped = (dims + DIM // 2) % DIM
    if head < heads:
        source = query + token * query_token_stride + head * query_head_stride
        target = new_query + (token * heads + head) * DIM
    else:
        source = key + token * key_token_stride + (head - heads) * key_head_stride
        target = new_key + (token * kv_heads + head - heads) * DIM
    straight = tl.load(source + dims, mask=inside, other=0.0).to(tl.float32)
    crossed = tl.load(source + swapped, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + token * DIM + dims, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * DIM + dims, mask=inside, other=0.0).to(tl.float32)
    rotated = straight * cosine + crossed * sine
    tl.store(target + dims, rotated.to(new_query.dtype.element_ty), mask=inside)


@triton.jit
def _row_times_weight(
    x,
    weight,
    bias,
    output,
    outer,
    tokens,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTER: tl.constexpr,
    BLOCK_FIRST: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token: some rows of the weight, each times the token's vector."""
    rows = tl.program_id(0) * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
    is_row = rows < outer
    of_rows = weight + rows[:, None].to(tl.int64) * INNER
    first_columns = tl.arange(0, BLOCK_FIRST)
    is_first = first_columns < INNER
    first = tl.load(
        of_rows + first_columns[None, :],
        mask=is_row[:, None] & is_first[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first_vector = tl.load(x + first_columns, mask=is_first, other=0.0).to(tl.float32)
    result = tl.sum(first.to(tl.float32) * first_vector[None, :], 1)
    if BLOCK_FIRST < INNER:
        sums = tl.zeros([BLOCK_OUTER, BLOCK_INNER], tl.float32)
        for start in range(BLOCK_FIRST, INNER, BLOCK_INNER):
            columns = start + tl.arange(0, BLOCK_INNER)
            inside = columns < INNER
            vector = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
            block = tl.load(
                of_rows + columns[None, :],
                mask=is_row[:, None] & inside[None, :],
                other=0.0,
                eviction_policy="evict_first",
            )
            sums += block.to(tl.float32) * vector[None, :]
        result += tl.sum(sums, 1)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(output + rows, result.to(output.dtype.element_ty), mask=is_row)


@triton.jit
def _rows_times_weight(
    x,
    weight,
    bias,
    output,
    outer,
    tokens,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTER: tl.constexpr,
    BLOCK_FIRST: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A few tokens: some rows of the weight, each times every token's vector."""
    rows = tl.program_id(0) * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
    is_row = rows < outer
    members = tl.arange(0, BLOCK_TOKENS)
    is_token = members < tokens
    of_rows = weight + rows[:, None].to(tl.int64) * INNER
    of_tokens = x + members[:, None] * INNER
    first_columns = tl.arange(0, BLOCK_FIRST)
    is_first = first_columns < INNER
    first = tl.load(
        of_rows + first_columns[None, :],
        mask=is_row[:, None] & is_first[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first_vectors = tl.load(
        of_tokens + first_columns[None, :], mask=is_token[:, None] & is_first[None, :], other=0.0
    )
    sums = tl.dot(first_vectors, tl.trans(first), input_precision="ieee")
    for start in range(BLOCK_FIRST, INNER, BLOCK_INNER):
        columns = start + tl.arange(0, BLOCK_INNER)
        inside = columns < INNER
        vectors = tl.load(of_tokens + columns[None, :], mask=is_token[:, None] & inside[None, :], other=0.0)
        block = tl.load(
            of_rows + columns[None, :],
            mask=is_row[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        sums = tl.dot(vectors, tl.trans(block), sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[None, :]
    tl.store(
        output + members[:, None] * outer + rows[None, :],
        sums.to(output.dtype.element_ty),
        mask=is_token[:, None] & is_row[None, :],
    )
