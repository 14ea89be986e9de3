"""Makes a platform's pool and allocator, in both engines: a wrong one is an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sgl_aspects.errors import PlatformError, PlatformTypeError
from sgl_aspects.platforms.answers import made_by, name_of


def make_pool(
    cls: type,
    factory: Callable[..., Any],
    *,
    size: int,
    page_size: int,
    dtype: torch.dtype,
    device: Any,
    layers: range,
    **row: int,
) -> Any:
    """Make the pool that ``factory`` named, with SGLang's keywords; ``row``: the sizes of its kind.

    Raises PlatformTypeError if its buffers differ from what it was made for.
    """
    pool = made_by(
        factory,
        cls,
        size=size,
        page_size=page_size,
        dtype=dtype,
        layer_num=len(layers),
        device=device,
        enable_memory_saver=False,
        start_layer=layers.start,
        end_layer=layers.stop - 1,
        **row,
    )
    slots, device = size + page_size, torch.device(device)
    if "head_num" in row:
        shapes = dict.fromkeys(("get_key_buffer", "get_value_buffer"), (row["head_num"], row["head_dim"]))
    else:
        rank = row["kv_lora_rank"]
        shapes = {"get_key_buffer": (1, rank + row["qk_rope_head_dim"]), "get_value_buffer": (1, rank)}
    for layer in {layers[0], layers[-1]} if layers else set():
        for method, shape in shapes.items():
            buffer = _call(pool, factory, method, layer)
            if not isinstance(buffer, Tensor):
                _refuse(pool, factory, f"{method}({layer}) returned {type(buffer).__name__}", "a tensor")
            found = (tuple(buffer.shape), buffer.dtype, buffer.device.type)
            if found != ((slots, *shape), dtype, device.type):
                needed = f"({slots}, {', '.join(map(str, shape))}), {dtype}, {device.type}"
                _refuse(pool, factory, f"{method}({layer}) is {', '.join(map(str, found))}", needed)
    return pool


def make_allocator(cls: type, factory: Callable[..., Any], size: int, *, page_size: int, **given: Any) -> Any:
    """Make the allocator that ``factory`` named, allocate a page and free it; ``given``: dtype, device,
    kvcache, need_sort.

    Raises PlatformTypeError for a wrong answer.
    """
    allocator = made_by(factory, cls, size, page_size=page_size, **given)
    free = _call(allocator, factory, "available_size")
    if free != size:
        _refuse(allocator, factory, f"available_size() returned {free!r} at first", f"{size}, all its tokens")
    slots = _call(allocator, factory, "alloc", page_size)
    if not isinstance(slots, Tensor):
        _refuse(allocator, factory, f"alloc({page_size}) returned {slots!r}", "a tensor of slots")
    page = slots.flatten().tolist()
    first = page[0] if page else 0
    if page != list(range(first, first + page_size)) or first < page_size or first % page_size:
        _refuse(
            allocator,
            factory,
            f"alloc({page_size}) returned slots {page[:8]}",
            f"the {page_size} slots of one page, not those of the padding, 0 to {page_size - 1},",
        )
    _call(allocator, factory, "free", slots)
    after = _call(allocator, factory, "available_size")
    if after != size:
        _refuse(allocator, factory, f"available_size() returned {after!r} after free", f"{size} as before")
    return allocator


def _call(made: Any, factory: Callable[..., Any], method: str, *args: Any) -> Any:
    try:
        return getattr(made, method)(*args)
    except Exception as error:
        words = ", ".join("slots" if isinstance(each, Tensor) else repr(each) for each in args)
        raise PlatformError(
            f"{name_of(factory)} names {_name(made)}, whose {method}({words}) failed: "
            f"{type(error).__name__}: {error}"
        ) from error


def _refuse(made: Any, factory: Callable[..., Any], found: str, needed: str) -> None:
    raise PlatformTypeError(f"{name_of(factory)} names {_name(made)}, whose {found}, and {needed} is needed")


def _name(made: Any) -> str:
    return f"{type(made).__module__}:{type(made).__qualname__}"
