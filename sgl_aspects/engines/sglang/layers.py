"""Adapters from the calls of SGLang's and vLLM's fused layers to the operators.

Each is named after the operator, and takes the layer and its call's arguments. NotImplemented: the operator
does not support the call, and the bridge runs the layer's own forward.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sgl_aspects.runtime.dispatch import operators


def silu_and_mul(layer: Any, x: Tensor) -> Any:
    return operators.silu_and_mul(x)


def gelu_and_mul(layer: Any, x: Tensor) -> Any:
    return operators.gelu_and_mul(x, layer.approximate)


def rms_norm(
    layer: Any,
    x: Tensor,
    residual: Tensor | None = None,
    post_residual_addition: Tensor | None = None,
    quant_linear: Any = None,
    **others: Any,
) -> Any:
    """(normalized, sum) with a residual; ``post_residual_addition`` is added to it first.

    ``quant_linear``: the product that takes the output; the layer may have it, too.
    """
    takers = (quant_linear, getattr(layer, "_quant_linear", None))
    if _asks(*others.values()) or not _is_plain_norm(layer) or any(map(_scales_its_input, takers)):
        return NotImplemented
    return operators.rms_norm(
        x, layer.weight, layer.variance_epsilon, _added(residual, post_residual_addition)
    )


def gemma_rms_norm(
    layer: Any, x: Tensor, residual: Tensor | None = None, post_residual_addition: Tensor | None = None
) -> Any:
    residual = _added(residual, post_residual_addition)
    return operators.gemma_rms_norm(x, layer.weight, layer.variance_epsilon, residual)


def rotary_embedding(
    layer: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    offsets: Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
    **others: Any,
) -> Any:
    """Rotate query and key [tokens, heads * head_size] or [tokens, heads, head_size]; shapes are kept."""
    if fused_set_kv_buffer_arg is not None or others or positions.ndim != 1 or key is None:
        return NotImplemented
    if offsets is not None:
        positions = positions + offsets
    return _turned(operators.rotary_embedding, layer, query, key, positions, not layer.is_neox_style)


def mrotary_embedding(
    layer: Any,
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    fused_set_kv_buffer_arg: Any = None,
    **others: Any,
) -> Any:
    """positions [tokens], or [axes, tokens] with the layer's ``mrope_section``."""
    if positions.ndim == 1:
        return rotary_embedding(
            layer, positions, query, key, fused_set_kv_buffer_arg=fused_set_kv_buffer_arg, **others
        )
    odd = fused_set_kv_buffer_arg is not None or others or getattr(layer, "mrope_interleaved_glm", False)
    if odd or not layer.mrope_section or not layer.is_neox_style:
        return NotImplemented
    sections, take_turns = tuple(layer.mrope_section), bool(getattr(layer, "mrope_interleaved", False))
    return _turned(operators.mrotary_embedding, layer, query, key, positions, sections, take_turns)


def topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: Tensor | None = None,
    scoring_func: str = "softmax",
    *more: Any,
    **others: Any,
) -> Any:
    """A function, not a layer, like SGLang's ``fused_topk``; ids in int32, as there."""
    if scoring_func not in ("softmax", "sigmoid") or _asks(correction_bias, *more, *others.values()):
        return NotImplemented
    weights, ids = operators.topk(gating_output, topk, renormalize, scoring_func)
    return weights, ids.to(torch.int32)


def fused_moe(layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any) -> Any:
    """Like SGLang's ``moe_forward_native``: stacked weights in ``w13_weight`` and ``w2_weight``."""
    config = moe_runner_config
    plain = config.activation in ("silu", "gelu") and not config.apply_router_weight_on_input
    odd = ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit", "routed_scaling_factor")
    if not plain or any(getattr(config, name, None) not in (None, 1.0) for name in odd):
        return NotImplemented
    if getattr(layer, "w13_weight_bias", None) is not None:
        return NotImplemented
    weights, ids, *_ = topk_output
    return operators.fused_moe(x, layer.w13_weight, layer.w2_weight, weights, ids.long(), config.activation)


def fused_moe_method(method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Like SGLang's ``UnquantizedFusedMoEMethod.forward_cuda`` with its Triton kernels; other kernels repack
    or swap the weights.
    """
    x, chosen = dispatch_output.hidden_states, dispatch_output.topk_output
    others = (
        "use_flashinfer_cutlass",
        "use_flashinfer_trtllm_moe",
        "_aiter_runner",
        "w13_swiglu_interleaved",
    )
    if not method.runner.runner_backend.is_triton() or any(getattr(method, name, None) for name in others):
        return NotImplemented
    if getattr(method.moe_runner_config, "no_combine", False):
        return NotImplemented
    if not hasattr(chosen, "topk_ids") or layer.w13_weight.shape[-1] != x.shape[-1]:
        return NotImplemented
    output = fused_moe(layer, x, chosen, method.moe_runner_config)
    if output is NotImplemented:
        return NotImplemented
    module: Any = importlib.import_module("sglang.srt.layers.moe.token_dispatcher")
    return module.StandardCombineInput(hidden_states=output)


def _turned(
    operator: Callable[..., tuple[Tensor, Tensor]],
    layer: Any,
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    *more: Any,
) -> tuple[Tensor, Tensor]:
    """Return query and key, rotated by a rotary operator, in their own shapes."""
    cos, sin = layer.cos_sin_cache.chunk(2, dim=-1)
    heads = (each.view(positions.shape[-1], -1, layer.head_size) for each in (query, key))
    turned_query, turned_key = operator(*heads, cos, sin, positions, *more)
    return turned_query.reshape(query.shape), turned_key.reshape(key.shape)


def _added(residual: Tensor | None, more: Tensor | None) -> Tensor | None:
    return residual if residual is None or more is None else residual + more


def _asks(*values: Any) -> bool:
    """Return whether any of a call's further arguments requests something; a tensor always does."""
    return any(isinstance(value, Tensor) or bool(value) for value in values)


def _is_plain_norm(layer: Any) -> bool:
    """Return whether the norm is over the whole row, unpadded, in its input's type."""
    odd = (
        "variance_size_override",
        "override_orig_dtype",
        "fp32_residual",
        "cast_x_before_out_mul",
        "x_pad_to_multiple",
    )
    return getattr(layer, "has_weight", True) and not any(getattr(layer, name, None) for name in odd)


def _scales_its_input(linear: Any) -> bool:
    """Return whether a product needs its input quantized with a scale of its own: norms may be fused with
    that.
    """
    return getattr(linear, "input_scale", None) is not None
