"""Attention backends over ragged batches, against a dense computation in float64 on the host."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sgl_aspects.conformance.check import Bench, check, require
from sgl_aspects.conformance.kv_pools import PAGE_SIZE, make_pool
from sgl_aspects.conformance.operators import TOLERANCES, difference, random_tensor
from sgl_aspects.runtime.attention.base import Attention
from sgl_aspects.runtime.attention.registry import attention_backend_class
from sgl_aspects.runtime.core import ForwardBatch, ForwardMode
from sgl_aspects.runtime.kv_cache import ReqToTokenPool

PAGES, HEAD_DIM, LAYER = 64, 16, 1
#: (tokens in the cache before the step, tokens of the step) of each request; near the edges of pages.
_DECODES = ((0, 1), (1, 1), (3, 1), (4, 1), (5, 1), (22, 1))
_PROMPTS = ((0, 1), (0, 4), (0, 13), (0, 5))
_CHUNKS = ((4, 4), (7, 6), (1, 9), (0, 3))
#: The value of slots that no request owns: read unmasked, it would dominate the output.
_POISON = 3e4


@dataclass
class RaggedStep:
    """One step's tensors, and the expected attention of each request."""

    batch: ForwardBatch
    backend: Any
    layer: Attention
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    #: [tokens, heads, head_dim] in float64 on the host.
    expected: torch.Tensor

    def run(self) -> torch.Tensor:
        self.backend.init_forward_metadata(self.batch)
        query = self.query.flatten(1)
        output: torch.Tensor = self.backend.forward(query, self.key, self.value, self.layer, self.batch)
        return output.view(*self.query.shape[:2], -1)


def make_step(
    bench: Bench,
    backend_name: str,
    requests: tuple[tuple[int, int], ...],
    *,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
) -> RaggedStep:
    """Build requests on scattered pages, decodes (one token after others) first."""
    requests = tuple(sorted(requests, key=lambda sizes: sizes[1] != 1 or sizes[0] == 0))
    num_decodes = sum(1 for before, new in requests if new == 1 and before > 0)
    pool = make_pool(bench, dtype, pages=PAGES, layers=LAYER + 1, head_num=kv_heads, head_dim=HEAD_DIM)
    for buffer in (pool.get_key_buffer(LAYER), pool.get_value_buffer(LAYER)):
        buffer[PAGE_SIZE:] = _POISON
    table = ReqToTokenPool(len(requests), PAGES * PAGE_SIZE, PAGE_SIZE, bench.device)
    pages = iter(random.Random(1).sample(range(1, PAGES + 1), PAGES))
    owned = [list(itertools.islice(pages, -(-sum(sizes) // PAGE_SIZE))) for sizes in requests]
    # Before anything is written there: a separate check covers a pool that clears other pages.
    if hasattr(pool, "clear"):
        pool.clear([page for mine in owned for page in mine])
    rows, queries, keys, values, expected = [], [], [], [], []
    for number, ((before, new), mine) in enumerate(zip(requests, owned)):
        length, seed = before + new, 1000 + 10 * number
        rows.append(table.add_row(mine))
        query = random_tensor(new, heads, HEAD_DIM, dtype=dtype, seed=seed)
        key = random_tensor(length, kv_heads, HEAD_DIM, dtype=dtype, seed=seed + 1)
        value = random_tensor(length, kv_heads, HEAD_DIM, dtype=dtype, seed=seed + 2)
        # Tokens before the step are stored without set_kv_buffer, which is under test too.
        slots = [mine[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in range(before)]
        old = torch.tensor(slots, dtype=torch.int64, device=bench.device)
        pool.get_key_buffer(LAYER)[old] = key[:before].to(bench.device)
        pool.get_value_buffer(LAYER)[old] = value[:before].to(bench.device)
        queries.append(query)
        keys.append(key[before:])
        values.append(value[before:])
        expected.append(dense_attention(query, key, value, before))
    positions = [at for before, new in requests for at in range(before, before + new)]
    counts = [new for _, new in requests]
    mode = ForwardMode.DECODE if num_decodes == len(requests) else ForwardMode.MIXED
    device = bench.device
    runner = SimpleNamespace(
        token_to_kv_pool=pool, req_to_token_pool=table, device=device, dtype=dtype, page_size=PAGE_SIZE
    )
    backend = attention_backend_class(backend_name)(runner)
    batch = ForwardBatch(
        forward_mode=mode if num_decodes else ForwardMode.EXTEND,
        input_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
        positions=torch.tensor(positions, device=device),
        req_pool_indices=torch.tensor(rows, device=device),
        num_decodes=num_decodes,
        num_new_tokens=counts,
        lengths=[before + new for before, new in requests],
        attention_backend=backend,
        req_to_token_pool=table,
    )
    return RaggedStep(
        batch,
        backend,
        Attention(LAYER, heads, kv_heads, HEAD_DIM),
        torch.cat(queries).to(device),
        torch.cat(keys).to(device),
        torch.cat(values).to(device),
        torch.cat(expected),
    )


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, before: int) -> torch.Tensor:
    """Compute one request: query [new, heads, dim] of the tokens after ``before`` others, key and value of
    all.
    """
    group = query.shape[1] // key.shape[1]
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * query.shape[2] ** -0.5
    ahead = torch.arange(len(key)) > torch.arange(before, before + len(query)).unsqueeze(1)
    weights = scores.masked_fill(ahead, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def backend_names(bench: Bench) -> list[str]:
    """Return the platform's default, and all backends that it adds."""
    platform = bench.platform
    return list(dict.fromkeys([platform.get_default_attention_backend(), *platform.get_attention_backends()]))


def _compare(bench: Bench, requests: tuple[tuple[int, int], ...]) -> str:
    worst = 0.0
    names = backend_names(bench)
    for name in names:
        for heads, kv_heads in ((4, 4), (6, 2), (3, 1)):
            for dtype, tolerance in TOLERANCES.items():
                with bench.platform.inference_mode():
                    step = make_step(bench, name, requests, heads=heads, kv_heads=kv_heads, dtype=dtype)
                    output = step.run()
                method = f"attention backend {name!r} (get_attention_backends, get_default_attention_backend)"
                require(output.dtype == dtype, f"an output of {dtype}", output.dtype, method)
                error = difference(output.cpu(), step.expected)
                require(
                    error <= tolerance,
                    f"dense attention in float64 within {tolerance:g}: {heads} heads on {kv_heads}, {dtype}, "
                    f"page size {PAGE_SIZE}, (cached, new) tokens {requests}",
                    f"an error of {error:.2g}",
                    method,
                )
                worst = max(worst, error / tolerance)
    return f"{', '.join(names)}: error at most {100 * worst:.0f} % of what is allowed"


for _name, _expects, _requests in (
    ("decode", "one token each over caches of all lengths", _DECODES[1:]),
    ("prompts", "whole prompts, each token over those before it", _PROMPTS),
    ("chunks", "parts of prompts over what was computed before", _CHUNKS),
    ("mixed", "decodes and parts of prompts in one step", (*_DECODES[1:4], *_CHUNKS, *_PROMPTS[1:3])),
):
    check(name=_name, write="get_attention_backends", expects=_expects)(
        lambda bench, requests=_requests: _compare(bench, requests)
    )
