"""Level 4 in SGLang: the prefix cache, the KV pool, attention and fused operators, call by call."""

from __future__ import annotations

import sys
from typing import Any

from sgl_aspects.engines.base import Role, parameter, shape_reader

# The prefix cache's class depends on the server's options.
CACHES = "sglang.srt.mem_cache.*_cache:*Cache"
# HiCache: its first level is the device's memory, its second the host's.
_TIERS = "sglang.srt.mem_cache.l2_transfer:L2TransferEngine"
_ALLOCATION = ("sglang.srt.mem_cache.allocation", "sglang.srt.mem_cache.common")


def _matched(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> int:
    """Return the length of the key: an attribute of the argument, or the argument itself."""
    given: Any = args[1] if len(args) > 1 else kwargs.get("params", kwargs.get("key"))
    return len(getattr(given, "key", given))


def _hit(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> int | None:
    if result is None:
        return None
    length = getattr(result, "device_prefix_len", None)
    return len(result.device_indices) if length is None else int(length)


def _evicted(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> int | None:
    wanted = args[1] if len(args) > 1 else kwargs.get("params", kwargs.get("num_tokens"))
    return getattr(wanted, "num_tokens", wanted)


def _allocated(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> int:
    batch = args[0] if args else kwargs["batch"]
    return len(batch.reqs) * int(args[1] if len(args) > 1 else kwargs.get("token_per_req", 1))


def _moved_bytes(transfers: Any) -> int:
    return sum(len(one.host_indices) * one.host_pool.size_per_token for one in transfers)


# Further transfers are of other states of the same tokens.
_MOVED = {
    "tokens": parameter(1, "transfers", lambda transfers: len(transfers[0].host_indices)),
    "bytes": parameter(1, "transfers", _moved_bytes),
}


def _backend(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> str | None:
    """Return the attention backend's class, which up to 0.5.20 the batch has."""
    batch = args[4] if len(args) > 4 else kwargs.get("forward_batch")
    found = getattr(batch, "attn_backend", None)
    if found is None:
        module = sys.modules.get("sglang.srt.layers.radix_attention")
        found = (
            module.get_attn_backend() if module is not None and hasattr(module, "get_attn_backend") else None
        )
    return None if found is None else type(found).__name__


def _operator(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> str:
    return str(getattr(args[0], "op", "") or type(args[0]).__name__)


def _method(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> str | None:
    return getattr(getattr(args[0], "_forward_method", None), "__qualname__", None)


ROLES = {
    "cache_match": Role((f"{CACHES}.match_prefix",), reads={"tokens": _matched, "hit_tokens": _hit}),
    "cache_insert": Role(
        (f"{CACHES}.checkpoint", f"{CACHES}.cache_finished_req"),
        reads={"tokens": lambda args, kwargs, *_: kwargs.get("up_to")},
    ),
    "cache_evict": Role((f"{CACHES}.evict_for_alloc", f"{CACHES}.evict"), reads={"tokens": _evicted}),
    "cache_load": Role((f"{_TIERS}.submit_host_to_device",), reads=_MOVED),
    "cache_write_back": Role((f"{_TIERS}.submit_device_to_host",), reads=_MOVED),
    "kv_alloc_prefill": Role(
        tuple(f"{module}:alloc_for_extend" for module in _ALLOCATION),
        reads={"tokens": lambda args, kwargs, result=None: (*args, *kwargs.values())[0].extend_num_tokens},
    ),
    "kv_alloc_decode": Role(
        tuple(f"{module}:alloc_for_decode" for module in _ALLOCATION), reads={"tokens": _allocated}
    ),
    "kv_free": Role(
        ("sglang.srt.mem_cache.common:release_kv_cache",),
        reads={"tokens": parameter(0, "req", lambda req: len(req.origin_input_ids) + len(req.output_ids))},
    ),
    "attention": Role(
        ("sglang.srt.layers.radix_attention:RadixAttention.forward",),
        reads={
            "layer": lambda args, *_: args[0].layer_id,
            "implementation": _backend,
            "shape": shape_reader(1),
        },
    ),
    "logits": Role(
        ("sglang.srt.layers.logits_processor:LogitsProcessor.forward",), reads={"shape": shape_reader(2)}
    ),
    "sampler": Role(
        ("sglang.srt.layers.sampler:Sampler.forward",), reads={"shape": shape_reader(1, "next_token_logits")}
    ),
    "operator": Role(
        (
            "sglang.kernels.fused_op:BaseFusedOp.forward",
            "sglang.srt.layers.utils.multi_platform:MultiPlatformOp.forward",
        ),
        reads={"operator": _operator, "implementation": _method, "shape": shape_reader(1)},
    ),
}
