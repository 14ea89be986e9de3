"""A vendor's pools and allocator in SGLang, which takes classes derived from its own.

One that is derived from SGLang's is handed over as it is. Any other keeps its memory: a class derived from
SGLang's is made that has the vendor's object and gets buffers and slots from it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

from sgl_aspects.errors import PlatformError
from sgl_aspects.platforms.answers import name_of

_POOLS = "sglang.srt.mem_cache.memory_pool"
_BASES = {"mha": "MHATokenToKVPool", "mla": "MLATokenToKVPool", "dsa": "DSATokenToKVPool"}
_ALLOCATORS = "sglang.srt.mem_cache.allocator"
#: What a pool is made with, beside its layers and the sizes of a row.
_PAGES = ("size", "page_size", "dtype", "device")


def pool_class(vendors: type, kind: str, method: Callable[..., Any]) -> type:
    """Return ``vendors``, the pool of ``kind`` that ``method`` named, as a class that SGLang takes.

    Where SGLang's pool of this kind, or of this version, can only be derived from, one that raises a
    PlatformError when it is made: SGLang queries all kinds, whatever the model needs.
    """
    base: Any = getattr(importlib.import_module(_POOLS), _BASES[kind])
    if issubclass(vendors, base):
        return vendors
    adapter = _ADAPTERS.get(kind)
    fits = adapter is not None and hasattr(base, adapter.seam)
    return _joined(vendors, adapter if adapter and fits else _Refused, base, method)


def allocator_class(vendors: type, method: Callable[..., Any]) -> type:
    """Return ``vendors``, the allocator that ``method`` named, as a class that SGLang takes."""
    base: Any = importlib.import_module(_ALLOCATORS).BaseTokenToKVPoolAllocator
    return vendors if issubclass(vendors, base) else _joined(vendors, _Allocator, base, method)


def _joined(vendors: type, adapter: type, base: type, method: Callable[..., Any]) -> type:
    members = {"vendors": vendors, "base": base, "factory": staticmethod(method)}
    return type(vendors.__name__, (adapter, base), {**members, "__module__": vendors.__module__})


class _Adapter:
    """Has the vendor's object as ``own``; attributes that SGLang's class does not have are its."""

    vendors: ClassVar[type]
    #: SGLang's class.
    base: ClassVar[type]
    factory: ClassVar[Callable[..., Any]]

    def __getattr__(self, name: str) -> Any:
        if "own" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__dict__["own"], name)


class _Refused(_Adapter):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise PlatformError(
            f"{name_of(self.factory)} names {self.vendors.__module__}:{self.vendors.__qualname__}: for "
            f"SGLang derive it from {_POOLS}:{self.base.__name__}, or return None for SGLang's own"
        )


class _Pool(_Adapter):
    #: The method of SGLang's pool that makes its buffers.
    seam: ClassVar[str]
    row: ClassVar[tuple[str, ...]]
    start_layer: int
    layer_num: int

    def make(self) -> tuple[list[Any], list[Any]]:
        """Make the vendor's pool; return its buffers of keys and of values by layer, which SGLang reads."""
        from sgl_aspects.runtime.kv_cache.checks import make_pool

        given = {name: getattr(self, name) for name in (*_PAGES, *self.row)}
        # SGLang's last layer is one more for the last stage of a pipeline.
        layers = range(self.start_layer, self.start_layer + self.layer_num)
        own = self.own = make_pool(self.vendors, self.factory, layers=layers, **given)
        keys = [own.get_key_buffer(layer) for layer in layers]
        return keys, [own.get_value_buffer(layer) for layer in layers]

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: Any,
        cache_v: Any,
        k_scale: float | None = None,
        v_scale: float | None = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: Any = None,
    ) -> None:
        dtype = self.own.dtype
        if dcp_kv_mask is not None:
            self.refuse()
        if cache_k.dtype != dtype:
            cache_k = (cache_k if k_scale is None else cache_k / k_scale).to(dtype)
            cache_v = (cache_v if v_scale is None else cache_v / v_scale).to(dtype)
        if layer_id_override is not None:
            layer = SimpleNamespace(layer_id=layer_id_override)
        # SGLang's slots, or its object with those of several pools.
        self.own.set_kv_buffer(layer, getattr(loc_info, "loc", loc_info), cache_k, cache_v)

    def refuse(self) -> None:
        raise PlatformError(
            f"{self.vendors.__module__}:{self.vendors.__qualname__}: quantized keys and values, caches that "
            f"grow after graphs are captured, and parallel decode contexts need a pool derived from "
            f"{_POOLS}:{self.base.__name__}"
        )


class _MHAPool(_Pool):
    seam = "_create_buffers_normal"
    row = ("head_num", "head_dim")

    def _create_buffers_normal(self) -> None:
        self.k_buffer, self.v_buffer = self.make()

    def _create_quantized_buffers(self) -> None:
        self.refuse()

    def _alloc_post_capture_buffers(self) -> None:
        self.refuse()


class _MLAPool(_Pool):
    seam = "_create_buffers"
    row = ("kv_lora_rank", "qk_rope_head_dim")

    def _create_buffers(self) -> None:
        self.kv_buffer, _ = self.make()

    def set_mla_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k_nope: Any,
        cache_k_rope: Any,
        layer_id_override: int | None = None,
    ) -> None:
        import torch

        key = torch.cat((cache_k_nope, cache_k_rope), dim=-1).view(len(cache_k_nope), 1, -1)
        value = key[..., : cache_k_nope.shape[-1]]
        self.set_kv_buffer(layer, loc_info, key, value, layer_id_override=layer_id_override)

    def get_mla_kv_buffer(self, layer: Any, loc: Any, dst_dtype: Any = None) -> tuple[Any, Any]:
        rows = self.own.get_key_buffer(layer.layer_id)[loc].to(dst_dtype or self.own.dtype)
        rank = self.kv_lora_rank
        return rows[..., :rank], rows[..., rank:]


_ADAPTERS: dict[str, type[_Pool]] = {"mha": _MHAPool, "mla": _MLAPool}


class _Allocator(_Adapter):
    free_group: list[Any] | None

    def __init__(
        self, size: int, page_size: int, dtype: Any, device: Any, kvcache: Any, need_sort: bool
    ) -> None:
        from sgl_aspects.runtime.kv_cache.checks import make_allocator

        given = {"dtype": dtype, "device": device, "kvcache": kvcache, "need_sort": need_sort}
        super().__init__(size, page_size, **given)  # type: ignore[call-arg]  # SGLang's
        self.page_size, self.num_pages = page_size, size // page_size
        size = self.num_pages * page_size
        self.own = make_allocator(self.vendors, self.factory, size, page_size=page_size, **given)

    def available_size(self) -> int:
        free: int = self.own.available_size()
        return free

    def clear(self) -> None:
        self.own.clear()
        self.free_group = None

    def alloc(self, need_size: int) -> Any:
        return self.own.alloc(need_size)

    def free(self, free_index: Any) -> None:
        """Free now, or at the end of the group that SGLang has begun."""
        if free_index.numel() == 0:
            return
        if self.free_group is None:
            self.own.free(free_index)
        else:
            self.free_group.append(free_index.clone())

    def alloc_extend(
        self,
        prefix_lens: Any,
        prefix_lens_cpu: Any,
        seq_lens: Any,
        seq_lens_cpu: Any,
        last_loc: Any,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Any:
        """Return slots for the tokens from ``prefix_lens`` to ``seq_lens`` of each request: the rest of its
        last page, in which ``last_loc`` is its newest token, then new pages. None, and nothing allocated, if
        there are not enough.
        """
        import torch

        size = self.page_size
        new_pages = -(-seq_lens_cpu // size) + (-prefix_lens_cpu // size)
        slots = self.own.alloc(int(new_pages.sum()) * size)
        if slots is None:
            return None
        new_pages = new_pages.to(last_loc.device)
        counts = (seq_lens - prefix_lens).long()
        owner = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        token = torch.arange(len(owner), device=counts.device) - (counts.cumsum(0) - counts)[owner]
        # How many of its tokens a request's last page takes, and where its new pages begin in ``slots``.
        room = (-prefix_lens % size)[owner]
        start = ((new_pages.cumsum(0) - new_pages) * size)[owner]
        is_old = token < room
        place = torch.where(is_old, 0, start + token - room)
        new = slots[place] if len(slots) else place
        return torch.where(is_old, last_loc[owner] + 1 + token, new).long()

    def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
        """Return a slot for the newest token of each request."""
        before = seq_lens - 1, seq_lens_cpu - 1
        return self.alloc_extend(*before, seq_lens, seq_lens_cpu, last_loc, len(seq_lens))
