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
#: Rows of the weight that a program takes then: with fewer, programs together read the tokens as often as to
#: be slower by it. This and the other sizes were measured on an H100, in whole decode steps.
_BLOCK_OUTER = 64
#: With fewer programs than this the device is not busy, and rows are split.
_PROGRAMS = 128


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
    tensors = x, x if residual is None else residual.contiguous(), weight, output, total
    options = {"HAS_RESIDUAL": residual is not None, "num_warps": 4 if size <= 2048 else 8, **overlapping()}
    _rms_norm[(x.numel() // size,)](*tensors, eps, SIZE=size, BLOCK=triton.next_power_of_2(size), **options)
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
    new_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    new_key = torch.empty_like(key, memory_format=torch.contiguous_format)
    strides = *query.stride()[:2], *key.stride()[:2], cos.stride(0), sin.stride(0)
    options = {"DIM": dim, "BLOCK": triton.next_power_of_2(dim), "num_warps": 1, **overlapping()}
    _rotate[(tokens, heads + kv_heads)](
        query, key, cos, sin, new_query, new_key, *strides, heads, kv_heads, **options
    )
    return new_query, new_key


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [tokens, inner] with at most SKINNY_TOKENS tokens, weight [outer, inner]: [tokens, outer]."""
    tokens, inner = x.shape
    outer = weight.shape[0]
    output = torch.empty(tokens, outer, dtype=x.dtype, device=x.device)
    arguments = (x.contiguous(), weight, weight if bias is None else bias, output)
    options = {"INNER": inner, "HAS_BIAS": bias is not None, **overlapping()}
    if tokens == 1:  # without the matrix units: whole steps are a tenth faster than with the other kernel
        options |= {"BLOCK_OUTER": 2, "BLOCK_INNER": min(2048, triton.next_power_of_2(inner))}
        warps = 8 if inner > 4096 else 4
        _row_times_weight[(triton.cdiv(outer, 2),)](*arguments, outer, num_warps=warps, **options)
        return output
    count = triton.cdiv(outer, _BLOCK_OUTER)
    splits = 1 if count >= _PROGRAMS else 4
    parts = output
    if splits > 1:
        parts = torch.empty(splits, outer, SKINNY_TOKENS, dtype=torch.float32, device=x.device)
    options |= {"BLOCK_TOKENS": SKINNY_TOKENS, "BLOCK_OUTER": _BLOCK_OUTER, "SPLITS": splits}
    options |= {"BLOCK_INNER": 128 if inner <= 4096 else 256, "num_warps": 4, "num_stages": 3}
    _rows_times_weight[(count, splits)](*arguments, parts, _arrivals(x.device), outer, tokens, **options)
    return output


@cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Zeros that programs count their arrivals in; the last to arrive leaves a zero again.

    One product after the other uses them: a process gives its device work in one stream.
    """
    return torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)


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
    cos_stride,
    sin_stride,
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
    cosine = tl.load(cos + token * cos_stride + dims, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + token * sin_stride + dims, mask=inside, other=0.0).to(tl.float32)
    rotated = straight * cosine + crossed * sine
    tl.store(target + dims, rotated.to(new_query.dtype.element_ty), mask=inside)


@triton.jit
def _row_times_weight(
    x,
    weight,
    bias,
    output,
    outer,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_OUTER: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token: some rows of the weight, each times the token's vector."""
    rows = tl.program_id(0) * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
    is_row = rows < outer
    columns = tl.arange(0, BLOCK_INNER)
    inside = columns < INNER
    pieces = weight + rows[:, None].to(tl.int64) * INNER + columns[None, :]
    piece = tl.load(pieces, is_row[:, None] & inside[None, :], 0.0, eviction_policy="evict_first")
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    vector = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    sums = piece.to(tl.float32) * vector[None, :]
    for start in range(BLOCK_INNER, INNER, BLOCK_INNER):
        inside = start + columns < INNER
        vector = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        piece = tl.load(pieces + start, is_row[:, None] & inside[None, :], 0.0, eviction_policy="evict_first")
        sums += piece.to(tl.float32) * vector[None, :]
    result = tl.sum(sums, 1)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)
    tl.store(output + rows, result.to(output.dtype.element_ty), mask=is_row)


@triton.jit
def _rows_times_weight(
    x,
    weight,
    bias,
    output,
    parts,
    arrivals,
    outer,
    tokens,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_OUTER: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A few tokens: some rows of the weight, or a part of each, times every token's vector.

    Where rows are split, each program leaves its sums, and the last to arrive adds them up.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    SHARE: tl.constexpr = ((INNER + SPLITS - 1) // SPLITS + BLOCK_INNER - 1) // BLOCK_INNER * BLOCK_INNER
    rows = tile * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
    columns = split * SHARE + tl.arange(0, BLOCK_INNER)
    members = tl.arange(0, BLOCK_TOKENS)
    is_row = (rows < outer)[:, None]
    is_token = (members < tokens)[None, :]
    pieces = weight + rows[:, None].to(tl.int64) * INNER + columns[None, :]
    vectors = x + members[None, :] * INNER + columns[:, None]
    inside = columns < INNER
    piece = tl.load(pieces, is_row & inside[None, :], 0.0, eviction_policy="evict_first")
    if OVERLAP:
        _fetch(weight, rows, split * SHARE + BLOCK_INNER, outer, INNER, BLOCK_INNER)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    vector = tl.load(vectors, is_token & inside[:, None], 0.0)
    sums = tl.dot(piece, vector, input_precision="ieee")
    for start in range(BLOCK_INNER, SHARE, BLOCK_INNER):
        inside = columns < INNER - start
        piece = tl.load(pieces + start, is_row & inside[None, :], 0.0, eviction_policy="evict_first")
        vector = tl.load(vectors + start, is_token & inside[:, None], 0.0)
        sums = tl.dot(piece, vector, sums, input_precision="ieee")
    is_place = is_row & is_token
    place = rows[:, None] * BLOCK_TOKENS + members[None, :]
    is_last = True
    if SPLITS > 1:
        tl.store(parts + split * outer * BLOCK_TOKENS + place, sums, mask=is_place)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals + tile, 1) == SPLITS - 1
        if is_last:
            tl.store(arrivals + tile, 0)
            sums = tl.zeros([BLOCK_OUTER, BLOCK_TOKENS], tl.float32)
            for other in tl.static_range(SPLITS):
                part = parts + other * outer * BLOCK_TOKENS + place
                sums += tl.load(part, is_place, 0.0, cache_modifier=".cg")
    if is_last:
        if HAS_BIAS:
            sums += tl.load(bias + rows, rows < outer, 0.0).to(tl.float32)[:, None]
        target = output + members[None, :] * outer + rows[:, None]
        tl.store(target, sums.to(output.dtype.element_ty), mask=is_place)


@triton.jit
def _fetch(weight, rows, begin, outer, INNER: tl.constexpr, COUNT: tl.constexpr):
    """Asks the cache for COUNT columns of these rows from column ``begin`` on, in lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
    columns = tl.minimum(begin + tl.arange(0, COUNT // LINE) * LINE, INNER - 1)
    lines = weight + tl.minimum(rows, outer - 1)[:, None].to(tl.int64) * INNER + columns[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
