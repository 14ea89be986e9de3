"""Attention backends over ragged batches, against a dense computation in float64 on the host."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import torch

from sgl_aspects.conformance.check import Bench, check
from sgl_aspects.conformance.kv_pools import PAGE_SIZE, make_pool
from sgl_aspects.conformance.operators import TOLERANCES, random_tensor, require_close
from sgl_aspects.runtime.attention.base import Attention
from sgl_aspects.runtime.attention.registry import attention_backend_class
from sgl_aspects.runtime.core import Batch, ForwardBatch, ForwardMode, Req
from sgl_aspects.runtime.kv_cache.pages import ReqToTokenPool, slots_of
from sgl_aspects.runtime.sampling_params import SamplingParams

PAGES, HEAD_DIM, LAYER = 64, 16, 1
#: (tokens in the cache before the step, tokens of the step) of each request; near the edges of pages.
Requests = tuple[tuple[int, int], ...]
_DECODES = ((0, 1), (1, 1), (3, 1), (4, 1), (5, 1), (22, 1))
_PROMPTS = ((0, 1), (0, 4), (0, 13), (0, 5))
_CHUNKS = ((4, 4), (7, 6), (1, 9), (0, 3))
#: The value of slots that no request owns: read unmasked, it would dominate the output.
_POISON = 3e4


def attend(
    bench: Bench, backend_name: str, requests: Requests, heads: int, kv_heads: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one step of requests on scattered pages: its output, and the right one in float64 on the host.

    Both are [tokens, heads, head_dim]. Decodes (one token after others) come first.
    """
    requests = tuple(sorted(requests, key=lambda sizes: sizes[1] != 1 or sizes[0] == 0))
    num_decodes = sum(1 for before, new in requests if new == 1 and before > 0)
    pool = make_pool(bench, dtype, pages=PAGES, layers=LAYER + 1, head_num=kv_heads, head_dim=HEAD_DIM)
    buffers = pool.get_key_buffer(LAYER), pool.get_value_buffer(LAYER)
    for buffer in buffers:
        buffer[PAGE_SIZE:] = _POISON
    table = ReqToTokenPool(len(requests), PAGES * PAGE_SIZE, PAGE_SIZE, bench.device)
    pages = iter(random.Random(1).sample(range(1, PAGES + 1), PAGES))
    owned = [list(itertools.islice(pages, -(-sum(sizes) // PAGE_SIZE))) for sizes in requests]
    # Before anything is written there: a separate check covers a pool that clears other pages.
    if hasattr(pool, "clear"):
        pool.clear([page for mine in owned for page in mine])
    reqs, tensors, expected = [], [], []
    for number, ((before, new), mine) in enumerate(zip(requests, owned)):
        length, seed = before + new, 1000 + 10 * number
        req = Req(str(number), [0] * length, SamplingParams(), random.Random())
        req.computed_tokens, req.row = before, table.add_row(mine)
        reqs.append(req)
        query = random_tensor(new, heads, HEAD_DIM, dtype=dtype, seed=seed)
        key = random_tensor(length, kv_heads, HEAD_DIM, dtype=dtype, seed=seed + 1)
        value = random_tensor(length, kv_heads, HEAD_DIM, dtype=dtype, seed=seed + 2)
        # Tokens before the step are stored without set_kv_buffer, which is under test too.
        old = slots_of(mine, PAGE_SIZE)[:before].to(bench.device)
        for buffer, rows in zip(buffers, (key, value)):
            buffer[old] = rows[:before].to(bench.device)
        tensors.append((query, key[before:], value[before:]))
        expected.append(dense_attention(query, key, value, before))
    runner = SimpleNamespace(
        token_to_kv_pool=pool, req_to_token_pool=table, device=bench.device, dtype=dtype, page_size=PAGE_SIZE
    )
    backend = attention_backend_class(backend_name)(runner)
    mode = ForwardMode.DECODE if num_decodes == len(requests) else ForwardMode.MIXED
    mode = mode if num_decodes else ForwardMode.EXTEND
    counts = [new for _, new in requests]
    step = Batch(mode, reqs, counts, [True] * len(reqs), step_id=0, num_decodes=num_decodes)
    batch = ForwardBatch.of(step, backend, table)
    query, key, value = (torch.cat(parts).to(bench.device) for parts in zip(*tensors))
    layer = Attention(LAYER, heads, kv_heads, HEAD_DIM)
    backend.init_forward_metadata(batch)
    output: torch.Tensor = backend.forward(query.flatten(1), key, value, layer, batch)
    return output.view(*query.shape[:2], -1), torch.cat(expected)


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


def _compare(bench: Bench, requests: Requests) -> str:
    worst = 0.0
    platform = bench.platform
    names = dict.fromkeys([platform.get_default_attention_backend(), *platform.get_attention_backends()])
    for name in names:
        for heads, kv_heads in ((4, 4), (6, 2), (3, 1)):
            for dtype in TOLERANCES:
                with platform.inference_mode():
                    output, right = attend(bench, name, requests, heads, kv_heads, dtype)
                method = f"attention backend {name!r} (get_attention_backends, get_default_attention_backend)"
                case = f"{heads} heads on {kv_heads}, page size {PAGE_SIZE}, (cached, new) tokens {requests}"
                used = require_close(output, right, dtype, f"dense attention in float64, {case}", method)
                worst = max(worst, used)
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
