"""Rotary position embedding of queries and keys in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_aspects.errors import UnsupportedCallError
from sgl_aspects.runtime.dispatch.define import OPERATORS
from sgl_aspects.runtime.dispatch.triton import overlapping


def rotary_embedding(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.compiler.is_compiling():  # the compiler writes kernels of its own
        return OPERATORS["rotary_embedding"].reference(query, key, cos, sin, positions, interleaved)  # type: ignore[no-any-return]
    tokens, heads, dim = query.shape
    if interleaved or 2 * cos.shape[-1] != dim:
        raise UnsupportedCallError("this kernel rotates whole heads, in halves")
    kv_heads = key.shape[1]
    new_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    new_key = torch.empty_like(key, memory_format=torch.contiguous_format)
    strides = *query.stride()[:2], *key.stride()[:2], cos.stride(0), sin.stride(0)
    options = {"DIM": dim, "BLOCK": triton.next_power_of_2(dim), "num_warps": 1, **overlapping()}
    _rotate[(tokens, heads + kv_heads)](
        query, key, cos, sin, positions, new_query, new_key, *strides, heads, kv_heads, **options
    )
    return new_query, new_key


@triton.jit
def _rotate(
    query,
    key,
    cos,
    sin,
    positions,
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
    HALF: tl.constexpr = DIM // 2
    swapped = (dims + HALF) % DIM
    row = tl.load(positions + token)
    if head < heads:
        source = query + token * query_token_stride + head * query_head_stride
        target = new_query + (token * heads + head) * DIM
    else:
        source = key + token * key_token_stride + (head - heads) * key_head_stride
        target = new_key + (token * kv_heads + head - heads) * DIM
    straight = tl.load(source + dims, mask=inside, other=0.0).to(tl.float32)
    crossed = tl.load(source + swapped, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + row * cos_stride + dims % HALF, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + row * sin_stride + dims % HALF, mask=inside, other=0.0).to(tl.float32)
    sine = tl.where(dims < HALF, -sine, sine)
    rotated = straight * cosine + crossed * sine
    tl.store(target + dims, rotated.to(new_query.dtype.element_ty), mask=inside)
