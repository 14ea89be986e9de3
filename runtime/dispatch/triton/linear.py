"""Products of a few tokens with a weight: the time is that of reading the weight once."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl

from sgl_aspects.runtime.dispatch.define import OPERATORS
from sgl_aspects.runtime.dispatch.triton import overlapping

#: The most tokens for which this file's kernel is faster than the device's library.
SKINNY_TOKENS = 16
#: Rows of the weight that a program takes then: with fewer, the programs together read the tokens too often.
#: This and the other sizes were measured on an H100, in whole decode steps.
_BLOCK_OUTER = 64
#: With fewer programs than this the device is not busy, and rows are split.
_PROGRAMS = 128


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    packed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Few tokens by this file's kernel, many by the device's library."""
    if torch.compiler.is_compiling():  # the compiler writes kernels of its own
        return OPERATORS["linear"].reference(x, weight, bias, packed)  # type: ignore[no-any-return]
    if x.ndim != 2 or len(x) > SKINNY_TOKENS or x.dtype is torch.float32:
        return F.linear(x, weight, bias)
    return skinny_linear(x, weight, bias)


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [tokens, inner] with at most SKINNY_TOKENS tokens, weight [outer, inner]: [tokens, outer]."""
    tokens, inner = x.shape
    outer = weight.shape[0]
    output = torch.empty(tokens, outer, dtype=x.dtype, device=x.device)
    arguments = (x.contiguous(), weight, weight if bias is None else bias, output)
    options = {"INNER": inner, "HAS_BIAS": bias is not None, **overlapping()}
    if tokens == 1:  # without the matrix units: whole steps are a tenth faster than with the other kernel
        options |= {"BLOCK_OUTER": 2, "BLOCK_INNER": min(1024, triton.next_power_of_2(inner))}
        _row_times_weight[(triton.cdiv(outer, 2),)](*arguments, outer, num_warps=4, **options)
        return output
    count = triton.cdiv(outer, _BLOCK_OUTER)
    splits = 1 if count >= _PROGRAMS else 4
    parts = x.new_empty(splits, outer, SKINNY_TOKENS, dtype=torch.float32) if splits > 1 else output
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
    """Prefetch COUNT columns of these rows from column ``begin`` on, in cache lines of 128 bytes."""
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
