"""Key-value pools and the page allocator: what is written is read, and nothing else changes."""

from __future__ import annotations

from typing import Any

import torch

from sgl_aspects.platforms import resolve_qualified_name
from sgl_aspects.runtime.conformance.check import Bench, NotApplicableError, check, require
from sgl_aspects.runtime.conformance.operators import random_tensor

LAYERS, HEADS, HEAD_DIM, PAGE_SIZE, PAGES = 2, 3, 8, 4, 9
_DTYPES = (torch.float32, torch.bfloat16)


def make_pool(bench: Bench, dtype: torch.dtype, *, heads: int = HEADS, head_dim: int = HEAD_DIM) -> Any:
    """A pool of kind "mha" with PAGES pages that are handed out, and page 0 before them."""
    pool_class: Any = resolve_qualified_name(bench.platform.get_kv_pool_cls(kind="mha"))
    return pool_class(
        size=PAGES * PAGE_SIZE,
        page_size=PAGE_SIZE,
        dtype=dtype,
        layer_num=LAYERS,
        device=bench.device,
        head_num=heads,
        head_dim=head_dim,
    )


def _buffers(pool: Any, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return pool.get_key_buffer(layer), pool.get_value_buffer(layer)


@check(
    "kv_pools.shape",
    write="get_kv_pool_cls",
    expects="buffers [slots, heads, head_dim] of the type asked for",
)
def shape(bench: Bench) -> str:
    slots = (PAGES + 1) * PAGE_SIZE  # the size asked for, and page 0
    for dtype in _DTYPES:
        pool = make_pool(bench, dtype)
        require(getattr(pool, "dtype", None) == dtype, "get_kv_pool_cls", f"pool.dtype {dtype}", pool.dtype)
        for layer in range(LAYERS):
            for buffer in _buffers(pool, layer):
                require(buffer.dtype == dtype, "get_kv_pool_cls", f"buffers of {dtype}", buffer.dtype)
                require(
                    tuple(buffer.shape) == (slots, HEADS, HEAD_DIM),
                    "get_kv_pool_cls",
                    f"{(slots, HEADS, HEAD_DIM)}: size and page 0",
                    tuple(buffer.shape),
                )
                found = buffer.device.type
                require(found == bench.device.type, "get_kv_pool_cls", f"memory of {bench.device}", found)
    return f"{slots} slots, {LAYERS} layers"


@check(
    "kv_pools.write",
    write="set_kv_buffer of the pool",
    expects="each slot to hold what was written, others theirs",
)
def write(bench: Bench) -> str:
    for dtype in _DTYPES:
        pool, expected = _filled(bench, dtype)
        # Over the edges of pages, out of order, one layer at a time.
        slots = torch.tensor([PAGE_SIZE, 4 * PAGE_SIZE - 1, 4 * PAGE_SIZE, 2 * PAGE_SIZE + 1, 7])
        for layer in range(LAYERS):
            key = random_tensor(len(slots), HEADS, HEAD_DIM, dtype=dtype, seed=200 + layer)
            value = random_tensor(len(slots), HEADS, HEAD_DIM, dtype=dtype, seed=300 + layer)
            pool.set_kv_buffer(layer, slots.to(bench.device), key.to(bench.device), value.to(bench.device))
            expected[layer][0][slots], expected[layer][1][slots] = key, value
        _require_equal(pool, expected, "set_kv_buffer of the pool")
    return f"{len(slots)} slots of {(PAGES + 1) * PAGE_SIZE}"


@check("kv_pools.clear", write="clear of the pool", expects="the pages named to be zero, others unchanged")
def clear(bench: Bench) -> str:
    for dtype in _DTYPES:
        pool, expected = _filled(bench, dtype)
        pool.clear([2, 5])
        for pair in expected:
            for buffer in pair:
                for page in (2, 5):
                    buffer[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = 0
        _require_equal(pool, expected, "clear of the pool")
    return f"2 pages of {PAGES}"


@check(
    "kv_pools.move",
    write="get_key_buffer of the pool",
    expects="a page that is moved through the buffers to arrive",
)
def move(bench: Bench) -> str:
    for dtype in _DTYPES:
        pool, expected = _filled(bench, dtype)
        source = torch.arange(3 * PAGE_SIZE, 4 * PAGE_SIZE)
        target = torch.arange(8 * PAGE_SIZE, 9 * PAGE_SIZE)
        for layer in range(LAYERS):
            for buffer, right in zip(_buffers(pool, layer), expected[layer]):
                buffer[target.to(bench.device)] = buffer[source.to(bench.device)]
                right[target] = right[source]
        _require_equal(pool, expected, "get_key_buffer, get_value_buffer of the pool: views, not copies")
    return "page 3 to page 8"


@check("kv_pools.allocator", write="get_paged_allocator_cls", expects="pages from 1, each once, all of them")
def allocator(bench: Bench) -> str:
    allocator_class: Any = resolve_qualified_name(bench.platform.get_paged_allocator_cls())
    made = allocator_class(PAGES * PAGE_SIZE + 1, PAGE_SIZE)

    def need(condition: bool, expected: str, found: object) -> None:
        require(condition, "get_paged_allocator_cls", expected, found)

    full = PAGES * PAGE_SIZE
    need(made.total_size == full, f"total_size of whole pages, {full} tokens", made.total_size)
    need(made.available_size() == full, f"{full} tokens free at first", made.available_size())
    first = made.alloc(PAGE_SIZE + 1)
    need(len(first) == 2, f"2 pages for {PAGE_SIZE + 1} tokens", first)
    rest = made.alloc((PAGES - 2) * PAGE_SIZE)
    everything = sorted([*first, *rest])
    need(everything == list(range(1, PAGES + 1)), f"pages 1 to {PAGES}, each once", everything)
    need(made.alloc(1) is None, "None where no page is free", "pages")
    made.free(first)
    need(made.available_size() == 2 * PAGE_SIZE, f"{2 * PAGE_SIZE} tokens after free", made.available_size())
    need(made.alloc(3 * PAGE_SIZE) is None, "None for three pages of two", "pages")
    need(made.available_size() == 2 * PAGE_SIZE, "nothing taken then", made.available_size())
    again = made.alloc(2 * PAGE_SIZE)
    need(sorted(again) == sorted(first), f"the freed pages {sorted(first)} again", again)
    return f"{PAGES} pages"


@check(
    "kv_pools.mla", write="get_mla_kv_pool_cls", expects="a class for caches of one compressed row a token"
)
def mla(bench: Bench) -> str:
    return _declared(bench, "mla")


@check("kv_pools.dsa", write="get_nsa_kv_pool_cls", expects="a class for compressed rows with indexer keys")
def dsa(bench: Bench) -> str:
    return _declared(bench, "dsa")


def _declared(bench: Bench, kind: str) -> str:
    try:
        answer = bench.platform.get_kv_pool_cls(kind=kind)
    except NotImplementedError as error:
        raise NotApplicableError("not declared") from error
    return f"{resolve_qualified_name(answer).__name__} is there; no model of the runtime writes to it yet"


def _filled(bench: Bench, dtype: torch.dtype) -> tuple[Any, list[list[torch.Tensor]]]:
    """A pool whose every slot has been written, and on the host what it holds: [layer][key, value]."""
    pool = make_pool(bench, dtype)
    slots = (PAGES + 1) * PAGE_SIZE
    expected = []
    for layer in range(LAYERS):
        pair = [random_tensor(slots, HEADS, HEAD_DIM, dtype=dtype, seed=10 * layer + i) for i in range(2)]
        for buffer, content in zip(_buffers(pool, layer), pair):
            buffer.copy_(content.to(bench.device))
        expected.append(pair)
    return pool, expected


def _require_equal(pool: Any, expected: list[list[torch.Tensor]], method: str) -> None:
    for layer, pair in enumerate(expected):
        for name, found, right in zip(("key", "value"), _buffers(pool, layer), pair):
            wrong = (found.cpu() != right).flatten(1).any(1).nonzero().flatten().tolist()
            require(
                not wrong,
                method,
                f"the {name}s of layer {layer} as written, bit for bit",
                f"others in slots {wrong[:8]}{' ...' if len(wrong) > 8 else ''} (page size {PAGE_SIZE})",
            )
