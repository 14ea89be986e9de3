"""The targets of SGLang's fused operators, by version, and of its choice of their forward."""

from __future__ import annotations

#: Operator → the layer that computes it.
LAYERS: dict[str, str] = {
    "silu_and_mul": "sglang.srt.layers.activation:SiluAndMul",
    "gelu_and_mul": "sglang.srt.layers.activation:GeluAndMul",
    "rms_norm": "sglang.srt.layers.layernorm:RMSNorm",
    "gemma_rms_norm": "sglang.srt.layers.layernorm:GemmaRMSNorm",
    "rotary_embedding": "sglang.srt.layers.rotary_embedding.base:RotaryEmbedding",
    "mrotary_embedding": "sglang.srt.layers.rotary_embedding.mrope:MRotaryEmbedding",
}

#: Operator → functions that compute it.
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "topk": ("sglang.srt.layers.moe.topk:fused_topk_torch_native", "sglang.srt.layers.moe.topk:fused_topk"),
    "fused_moe": ("sglang.srt.layers.moe.fused_moe_native:moe_forward_native",),
}

#: Function of layers.py → the method of SGLang that it replaces. On GPUs a method runs the experts, and the
#: kernels depend on how their weights were repacked.
METHODS: dict[str, str] = {
    "fused_moe_method": "sglang.srt.layers.quantization.unquant:UnquantizedFusedMoEMethod.forward_cuda"
}
#: And the operator that it calls.
METHOD_OPERATORS = {"fused_moe_method": "fused_moe"}

#: Classes with ``register_oot_forward(op_cls, fn, platform_key)``, for platforms outside SGLang's tree.
REGISTRATIONS = (
    "sglang.kernels.fused_op:BaseFusedOp",  # 0.5.20 and later
    "sglang.srt.layers.utils.multi_platform:MultiPlatformOp",  # 0.5.12 to 0.5.16
)

#: The function that returns the forward of a layer, on every platform.
RESOLVERS = (
    "sglang.kernels.fused_op:BaseFusedOp._resolve_forward_method",  # 0.5.20 and later
    "sglang.srt.layers.utils.multi_platform:MultiPlatformOp.dispatch_forward",  # 0.5.10 to 0.5.16
)

#: The class of the ranks' communication in SGLang.
GROUP_COORDINATOR = "sglang.srt.distributed.parallel_state:GroupCoordinator"
