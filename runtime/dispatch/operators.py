"""The operators that are dispatched, each with its reference."""

from __future__ import annotations

from sgl_aspects.runtime.dispatch.reference import delta_rule, dense, experts, rotary
from sgl_aspects.runtime.dispatch.registry import OperatorSpec, OpRegistry

OPERATORS: tuple[OperatorSpec, ...] = (
    OperatorSpec("silu_and_mul", dense.silu_and_mul),
    OperatorSpec("gelu_and_mul", dense.gelu_and_mul),
    OperatorSpec("rms_norm", dense.rms_norm),
    OperatorSpec("gemma_rms_norm", dense.gemma_rms_norm),
    OperatorSpec("linear", dense.linear),
    OperatorSpec("embedding", dense.embedding, keyed_by="weight"),
    OperatorSpec("rotary_embedding", rotary.rotary_embedding),
    OperatorSpec("mrotary_embedding", rotary.mrotary_embedding),
    OperatorSpec("topk", experts.topk),
    OperatorSpec("fused_moe", experts.fused_moe),
    OperatorSpec("chunk_gated_delta_rule", delta_rule.chunk_gated_delta_rule),
    OperatorSpec(
        "fused_recurrent_gated_delta_rule",
        delta_rule.fused_recurrent_gated_delta_rule,
        mutates=("state",),
    ),
)


def define_operators(registry: OpRegistry) -> None:
    for spec in OPERATORS:
        registry.define(spec)
