"""Key-value pools of each kind, and the page allocator: written values are read, and others do not change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sgl_aspects.conformance.check import Bench, check, if_declared, require
from sgl_aspects.conformance.operators import random_tensor
from sgl_aspects.platforms import resolve_qualified_name
from sgl_aspects.runtime.kv_cache import checks
from sgl_aspects.runtime.kv_cache.pages import pages_of, slots_of

LAYERS, PAGE_SIZE, PAGES = 2, 4, 9
SLOTS = (PAGES + 1) * PAGE_SIZE  # the requested size, and page 0
_DTYPES = (torch.float32, torch.bfloat16)
#: The arguments of a pool of each kind.
ROWS: dict[str, dict[str, int]] = {
    "mha": {"head_num": 3, "head_dim": 8},
    "mla": {"kv_lora_rank": 12, "qk_rope_head_dim": 4},
    "dsa": {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "kv_cache_dim": 16, "index_head_dim": 6},
}
#: The parts of a token in a pool of each kind, and their shapes.
_PARTS: dict[str, dict[str, tuple[int, ...]]] = {
    "mha": {"key": (3, 8), "value": (3, 8)},
    "mla": {"key": (1, 16)},
    "dsa": {"key": (1, 16), "index_key": (6,)},
}
#: [layer][part]: a pool's contents, on the host.
Contents = list[dict[str, torch.Tensor]]


def make_pool(
    bench: Bench, dtype: torch.dtype, kind: str = "mha", pages: int = PAGES, layers: int = LAYERS, **rows: int
) -> Any:
    """A pool with ``pages`` that are handed out, and page 0 before them; ``rows`` as in ROWS."""
    factory = bench.platform.get_kv_pool_cls
    return checks.make_pool(
        resolve_qualified_name(factory(kind=kind)),
        factory,
        size=pages * PAGE_SIZE,
        page_size=PAGE_SIZE,
        dtype=dtype,
        device=bench.device,
        layers=range(layers),
        **(rows or ROWS[kind]),
    )


def _buffer(pool: Any, part: str, layer: int) -> torch.Tensor:
    """[slots, …] of one part, a view."""
    buffer: torch.Tensor = getattr(pool, f"get_{part}_buffer")(layer)
    return buffer


# -- common to every kind: checks of "mha", also called for the others --------------------------------------


@check(write="get_kv_pool_cls", expects="buffers [slots, heads, head_dim] of the requested type")
def shape(bench: Bench, kind: str = "mha") -> str:
    """Buffers of the requested type, on the device, one row per slot."""
    for dtype in _DTYPES:
        pool = make_pool(bench, dtype, kind)
        require(getattr(pool, "dtype", None) == dtype, f"pool.dtype {dtype}", pool.dtype)
    return f"{SLOTS} slots, {LAYERS} layers"


@check(write="set_kv_buffer of the pool", expects="each slot to hold what was written, others theirs")
def write(bench: Bench, kind: str = "mha") -> str:
    """Write over the edges of pages, out of order, one layer at a time."""
    slots = torch.tensor([PAGE_SIZE, 4 * PAGE_SIZE - 1, 4 * PAGE_SIZE, 2 * PAGE_SIZE + 1, 7])
    there = slots.to(bench.device)
    for dtype in _DTYPES:
        pool, expected = _filled(bench, dtype, kind)
        for layer in range(LAYERS):
            new = {
                part: random_tensor(len(slots), *shape, dtype=dtype, seed=200 + 10 * layer + number)
                for number, (part, shape) in enumerate(_PARTS[kind].items())
            }
            for part, rows in new.items():
                expected[layer][part][slots] = rows
            given = {part: rows.to(bench.device) for part, rows in new.items()}
            value = given["value"] if kind == "mha" else given["key"][..., : ROWS[kind]["kv_lora_rank"]]
            pool.set_kv_buffer(SimpleNamespace(layer_id=layer), there, given["key"], value)
            if "index_key" in given:
                pool.set_index_key_buffer(SimpleNamespace(layer_id=layer), there, given["index_key"])
        _require_equal(pool, expected, "set_kv_buffer of the pool")
        if kind != "mha":  # values are the first part of the compressed row
            values = [{"value": parts["key"][..., : ROWS[kind]["kv_lora_rank"]]} for parts in expected]
            _require_equal(pool, values, "get_value_buffer of the pool")
    return f"{len(slots)} slots of {SLOTS}"


@check(write="clear of the pool", expects="the pages named to be zero, others unchanged")
def clear(bench: Bench, kind: str = "mha") -> str:
    """Clear two pages. Optional: a pool without it begins with zeros."""
    pool = make_pool(bench, _DTYPES[0], kind)
    if not hasattr(pool, "clear"):
        buffers = [_buffer(pool, part, layer) for part in _PARTS[kind] for layer in range(LAYERS)]
        left = sum(int(buffer.count_nonzero()) for buffer in buffers)
        require(left == 0, "a new pool of zeros where it has no clear", f"{left} others")
        return "no clear: zeros at first"
    for dtype in _DTYPES:
        pool, expected = _filled(bench, dtype, kind)
        pool.clear([2, 5])
        for parts in expected:
            for right in parts.values():
                for page in (2, 5):
                    right[page * PAGE_SIZE : (page + 1) * PAGE_SIZE] = 0
        _require_equal(pool, expected, "clear of the pool")
    return f"2 pages of {PAGES}"


@check(write="get_paged_allocator_cls", expects="the slots of pages from 1, each once, all of them")
def allocator(bench: Bench) -> str:
    factory, pool = bench.platform.get_paged_allocator_cls, make_pool(bench, _DTYPES[0])
    given = {"dtype": pool.dtype, "device": "cpu", "kvcache": pool, "need_sort": False}
    cls, full = resolve_qualified_name(factory()), PAGES * PAGE_SIZE
    made = checks.make_allocator(cls, factory, full, page_size=PAGE_SIZE, **given)

    def alloc(pages: int) -> list[int]:
        slots = made.alloc(pages * PAGE_SIZE)
        require(isinstance(slots, torch.Tensor), f"a tensor of {pages * PAGE_SIZE} slots", slots)
        found = pages_of(slots, PAGE_SIZE)
        require(slots_of(found, PAGE_SIZE).tolist() == slots.tolist(), "whole pages", slots.tolist())
        return found

    first = alloc(2)
    everything = sorted([*first, *alloc(PAGES - 2)])
    require(everything == list(range(1, PAGES + 1)), f"pages 1 to {PAGES}, each once", everything)
    require(made.alloc(PAGE_SIZE) is None, "None where no page is free", "slots")
    # Of the last page of a request only the slots that hold tokens come back.
    made.free(torch.tensor([page * PAGE_SIZE + at for page in first for at in range(PAGE_SIZE)][:-1]))
    freed, left = 2 * PAGE_SIZE, made.available_size
    require(left() == freed, f"{freed} tokens after free", left())
    require(made.alloc(3 * PAGE_SIZE) is None, "None for three pages of two", "slots")
    require(left() == freed, "nothing taken then", left())
    again = alloc(2)
    require(sorted(again) == sorted(first), f"the freed pages {sorted(first)} again", again)
    made.clear()
    require(left() == full, f"{full} tokens free after clear", left())
    return f"{PAGES} pages"


def _compressed(bench: Bench, kind: str) -> str:
    if_declared(lambda: bench.platform.get_kv_pool_cls(kind=kind))
    return ", ".join(step(bench, kind) for step in (shape, write, clear))


for _kind, _write, _expects in (
    ("mla", "get_mla_kv_pool_cls", "one compressed row a token: written, read back, cleared"),
    ("dsa", "get_nsa_kv_pool_cls", "compressed rows with indexer keys: written, read back, cleared"),
):
    check(name=_kind, write=_write, expects=_expects)(lambda bench, kind=_kind: _compressed(bench, kind))


def _filled(bench: Bench, dtype: torch.dtype, kind: str) -> tuple[Any, Contents]:
    """Return a pool whose every slot has been written, and its contents."""
    pool = make_pool(bench, dtype, kind)
    expected: Contents = []
    for layer in range(LAYERS):
        parts = {
            part: random_tensor(SLOTS, *shape, dtype=dtype, seed=10 * layer + number)
            for number, (part, shape) in enumerate(_PARTS[kind].items())
        }
        for part, content in parts.items():
            _buffer(pool, part, layer).copy_(content.to(bench.device))
        expected.append(parts)
    return pool, expected


def _require_equal(pool: Any, expected: Contents, method: str) -> None:
    for layer, parts in enumerate(expected):
        for part, right in parts.items():
            wrong = (_buffer(pool, part, layer).cpu() != right).flatten(1).any(1).nonzero().flatten().tolist()
            expected_here = f"the {part.replace('_', ' ')}s of layer {layer} as written, bit for bit"
            slots = f"{wrong[:8]}{' ...' if len(wrong) > 8 else ''}"
            require(not wrong, expected_here, f"others in slots {slots} (page size {PAGE_SIZE})", method)
