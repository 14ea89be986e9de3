"""Level 4 in the embedded runtime: the prefix cache, the KV pool, attention and operators, call by call."""

from __future__ import annotations

from typing import Any

from sgl_aspects.engines.base import Role, returned, shape_reader

_KV_CACHE = "sgl_aspects.runtime.kv_cache.manager:KVCache"


def _layer_id(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> int | None:
    layer = args[4] if len(args) > 4 else kwargs.get("layer")
    return getattr(layer, "layer_id", None)


def _class_name(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> str:
    return type(args[0]).__name__


def _operator(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> str:
    return args[0].op_name or type(args[0]).__name__


def _implementation(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> str | None:
    """Return the implementation that the policy chooses."""
    from sgl_aspects.runtime.dispatch import get_manager

    layer, *others = args
    name, manager = _operator(args, kwargs), get_manager()
    if name not in manager.registry:
        return None
    tensor = getattr(layer, manager.registry.spec(name).keyed_by, others[0] if others else None)
    key = getattr(tensor, "dtype", None), getattr(tensor, "device", None)
    return manager.select(name, *key).impl.impl_id


ROLES = {
    "cache_match": Role(
        (f"{_KV_CACHE}.match_prefix",),
        reads={"tokens": lambda args, *_: args[1].total_tokens, "hit_tokens": returned},
    ),
    "kv_alloc": Role((f"{_KV_CACHE}.alloc",), ("_", "tokens:num_tokens")),
    "attention": Role(
        ("sgl_aspects.runtime.attention.base:AttentionBackend+.forward",),
        reads={"layer": _layer_id, "implementation": _class_name, "shape": shape_reader(1)},
    ),
    "operator": Role(
        ("sgl_aspects.runtime.ops.base:Operator.forward",),
        reads={"operator": _operator, "implementation": _implementation, "shape": shape_reader(1)},
    ),
    "logits": Role(
        ("sgl_aspects.runtime.models.decoder:CausalLM.compute_logits",), reads={"shape": shape_reader(1)}
    ),
    "sampler": Role(
        ("sgl_aspects.runtime.sampling.sampler:Sampler.__call__",), reads={"shape": shape_reader(1)}
    ),
}
