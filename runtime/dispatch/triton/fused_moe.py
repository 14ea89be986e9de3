"""Experts for GPUs in Triton: all of them in two launches, without synchronization.

The (token, expert) pairs are put in order of their experts, and cut into blocks that have one expert each:

    expert of each pair      2 0 2 2 0 1   →   order of pairs   1 4 │ 5 │ 0 2 3
    blocks of two pairs      (1 4) expert 0, (5 .) expert 1, (0 2) (3 .) expert 2, nothing

The maximum number of blocks depends only on the numbers of pairs and experts, so that a captured graph serves
every step. Unused blocks do nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sgl_aspects.errors import UnsupportedCallError


def fused_moe(
    x: torch.Tensor,
    gate_up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str = "silu",
) -> torch.Tensor:
    if activation != "silu":
        raise UnsupportedCallError(f"this kernel's experts use silu, not {activation}")
    gate_up, down, weights, experts = gate_up_weight, down_weight, topk_weights, topk_ids
    tokens, hidden = x.shape
    inner = down.shape[2]
    chosen = experts.shape[1]
    pairs = tokens * chosen
    block = 16 if pairs <= 16 * len(down) else 64
    order, begins, ends, last_blocks = _grouped(experts.flatten(), len(down), block)
    blocks = min(pairs, len(down)) + pairs // block
    made = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
    parts = torch.empty(pairs, hidden, dtype=torch.float32, device=x.device)
    sizes = {"BLOCK_PAIRS": block, "BLOCK_OUTER": 64, "BLOCK_INNER": 64, "num_warps": 4, "num_stages": 3}
    sizes["BLOCK_EXPERTS"] = triton.next_power_of_2(len(down))
    groups = weights.contiguous(), order, begins, ends, last_blocks, len(down)
    _grouped_product[(blocks, triton.cdiv(inner, 64))](
        x.contiguous(), gate_up, made, *groups, inner, SOURCES=chosen, INNER=hidden, GATED=True, **sizes
    )
    _grouped_product[(blocks, triton.cdiv(hidden, 64))](
        made, down, parts, *groups, hidden, SOURCES=1, INNER=inner, GATED=False, **sizes
    )
    return parts.view(tokens, chosen, hidden).sum(1).to(x.dtype)


def _grouped(
    experts: torch.Tensor, count: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, from the pairs' experts [pairs]: the pairs in order of experts; for each expert the begin and
    end of its pairs there, and the number of blocks up to and including it.
    """
    ones = torch.ones_like(experts)
    counts = torch.zeros(count, dtype=experts.dtype, device=experts.device).scatter_add_(0, experts, ones)
    ends = counts.cumsum(0)
    return experts.argsort(stable=True), ends - counts, ends, ((counts + block - 1) // block).cumsum(0)


@triton.jit
def _grouped_product(
    x,
    weight,
    output,
    factors,
    order,
    begins,
    ends,
    last_blocks,
    experts,
    outer,
    SOURCES: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_OUTER: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    """A block of pairs times some rows of its expert's weight.

    GATED: the weight has twice ``outer`` rows, and the output is silu(first half) * second half. Otherwise
    each pair is multiplied with its factor. Row ``pair // SOURCES`` of ``x`` is a pair's input.
    """
    block = tl.program_id(0)
    # The expert is the first whose blocks go on past this one.
    numbers = tl.arange(0, BLOCK_EXPERTS)
    past = tl.load(last_blocks + numbers, numbers < experts, block + 1)
    expert = tl.sum((past <= block).to(tl.int64), 0)
    if expert < experts:
        begin, end = tl.load(begins + expert), tl.load(ends + expert)
        first_block = tl.load(last_blocks + expert) - (end - begin + BLOCK_PAIRS - 1) // BLOCK_PAIRS
        places = begin + (block - first_block) * BLOCK_PAIRS + tl.arange(0, BLOCK_PAIRS)
        is_pair = places < end
        pairs = tl.load(order + places, is_pair, 0)
        rows = tl.program_id(1) * BLOCK_OUTER + tl.arange(0, BLOCK_OUTER)
        is_row = rows < outer
        columns = tl.arange(0, BLOCK_INNER)
        vectors = x + (pairs // SOURCES)[:, None] * INNER + columns[None, :]
        height = 2 * outer if GATED else outer
        pieces = weight + (expert * height + rows[None, :]) * INNER + columns[:, None]
        sums = tl.zeros([BLOCK_PAIRS, BLOCK_OUTER], tl.float32)
        ups = tl.zeros([BLOCK_PAIRS, BLOCK_OUTER], tl.float32)
        for start in range(0, INNER, BLOCK_INNER):
            inside = columns < INNER - start
            vector = tl.load(vectors + start, is_pair[:, None] & inside[None, :], 0.0)
            piece = tl.load(pieces + start, inside[:, None] & is_row[None, :], 0.0)
            sums = tl.dot(vector, piece, sums, input_precision="ieee")
            if GATED:
                piece = tl.load(pieces + outer * INNER + start, inside[:, None] & is_row[None, :], 0.0)
                ups = tl.dot(vector, piece, ups, input_precision="ieee")
        if GATED:
            # Rounded where the reference rounds.
            gate = sums.to(x.dtype.element_ty).to(tl.float32)
            up = ups.to(x.dtype.element_ty).to(tl.float32)
            active = (gate / (1.0 + tl.exp(-gate))).to(x.dtype.element_ty).to(tl.float32)
            sums = active * up
        else:
            sums = sums.to(x.dtype.element_ty).to(tl.float32)
            sums *= tl.load(factors + pairs, is_pair, 0.0).to(tl.float32)[:, None]
        target = output + pairs[:, None] * outer + rows[None, :]
        tl.store(target, sums.to(output.dtype.element_ty), mask=is_pair[:, None] & is_row[None, :])
