"""ModelConfig from the config.json of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_aspects.errors import ModelLoadError
from sgl_aspects.runtime.loader.model_config import (
    ROPE_SCALINGS,
    IndexerConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)
from sgl_aspects.runtime.models.registry import known_architectures


def config_from_hugging_face(
    raw: Mapping[str, Any], generation: Mapping[str, Any], source: str
) -> ModelConfig:
    """Read ``config.json`` (and the end tokens of ``generation_config.json``); ``source`` is for messages."""
    architectures = raw.get("architectures") or ["(none)"]
    architecture = next((name for name in architectures if name in known_architectures()), None)
    if architecture is None:
        raise ModelLoadError(
            f"{source}: architecture {', '.join(map(str, architectures))} is not known to this engine; "
            f"it knows {', '.join(known_architectures())}"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "?")
        raise ModelLoadError(
            f"{source}: quantization_config ({method}) is not supported; use the unquantized checkpoint"
        )
    if raw.get("use_sliding_window"):
        raise ModelLoadError(f"{source}: use_sliding_window is not supported")
    try:
        heads = raw["num_attention_heads"]
        hidden_size = raw["hidden_size"]
        attention_bias = bool(raw.get("attention_bias", False))
        return ModelConfig(
            architecture=architecture,
            vocab_size=raw["vocab_size"],
            hidden_size=hidden_size,
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden_size // heads,
            context_length=raw.get("max_position_embeddings", 2048),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            dtype=_dtype(raw, source),
            rope=_rope(raw, source),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            # Qwen2's biases are not in its config: always there, and never after attention.
            attention_bias=attention_bias or architecture.startswith("Qwen2"),
            attention_output_bias=attention_bias and not architecture.startswith("Qwen2"),
            qk_norm=architecture.startswith("Qwen3"),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            hidden_act=raw.get("hidden_act", "silu"),
            eos_token_ids=_eos(generation.get("eos_token_id", raw.get("eos_token_id"))),
            moe=_moe(raw, architecture),
            mla=_mla(raw, architecture),
        )
    except KeyError as missing:
        raise ModelLoadError(f"{source} lacks the key {missing}") from missing
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelLoadError(f"{source} holds a value of the wrong type: {error}") from error


def _moe(raw: Mapping[str, Any], architecture: str) -> MoEConfig | None:
    """Qwen3's and DeepSeek's keys."""
    layers = range(raw["num_hidden_layers"])
    if architecture == "Qwen3MoeForCausalLM":
        step = raw.get("decoder_sparse_step", 1)
        plain = raw.get("mlp_only_layers") or []
        return MoEConfig(
            num_experts=raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"],
            experts_per_token=raw["num_experts_per_tok"],
            intermediate_size=raw["moe_intermediate_size"],
            dense_layers=frozenset(i for i in layers if i in plain or (i + 1) % step),
            normalize=bool(raw.get("norm_topk_prob", False)),
        )
    if not architecture.startswith("Deepseek") or not raw.get("n_routed_experts"):
        return None
    is_v2 = architecture == "DeepseekV2ForCausalLM"
    grouped = not is_v2 or raw.get("topk_method") == "group_limited_greedy"
    return MoEConfig(
        num_experts=raw["n_routed_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        dense_layers=_dense_layers(raw),
        num_shared_experts=raw.get("n_shared_experts") or 0,
        scoring="softmax" if is_v2 else "sigmoid",
        normalize=bool(raw.get("norm_topk_prob", False)) and not is_v2,
        scaling_factor=float(raw.get("routed_scaling_factor", 1.0)),
        num_groups=(raw.get("n_group") or 1) if grouped else 1,
        topk_groups=(raw.get("topk_group") or 1) if grouped else 1,
        group_by_top2=not is_v2,
        has_correction_bias=not is_v2,
        float32_router=True,
    )


def _dense_layers(raw: Mapping[str, Any]) -> frozenset[int]:
    layers = range(raw["num_hidden_layers"])
    types = raw.get("mlp_layer_types")
    if types:
        return frozenset(i for i in layers if types[i] == "dense")
    first, step = raw.get("first_k_dense_replace", 0), raw.get("moe_layer_freq", 1)
    return frozenset(i for i in layers if i < first or i % step)


def _mla(raw: Mapping[str, Any], architecture: str) -> MLAConfig | None:
    if not architecture.startswith("Deepseek"):
        return None
    indexer = None
    if architecture == "DeepseekV32ForCausalLM":
        indexer = IndexerConfig(
            num_heads=raw["index_n_heads"], head_dim=raw["index_head_dim"], topk=raw["index_topk"]
        )
    return MLAConfig(
        kv_lora_rank=raw["kv_lora_rank"],
        qk_nope_head_dim=raw["qk_nope_head_dim"],
        qk_rope_head_dim=raw["qk_rope_head_dim"],
        v_head_dim=raw["v_head_dim"],
        q_lora_rank=raw.get("q_lora_rank"),
        interleaved=bool(raw.get("rope_interleave", True)),
        indexer=indexer,
    )


def _dtype(raw: Mapping[str, Any], source: str) -> str:
    """``dtype`` in newer files, ``torch_dtype`` in older ones."""
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ModelLoadError(f"{source}: dtype {dtype!r} is not supported; known: float32, bfloat16, float16")
    return str(dtype)


def _rope(raw: Mapping[str, Any], source: str) -> RopeConfig:
    """``rope_parameters`` in newer files; ``rope_theta`` and ``rope_scaling`` in older ones."""
    values = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    scaling = values.get("rope_type", values.get("type", "default"))
    if scaling not in ROPE_SCALINGS:
        raise ModelLoadError(
            f"{source}: rope scaling {scaling!r} is not supported; known: {', '.join(ROPE_SCALINGS)}"
        )
    if values.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelLoadError(f"{source}: partial_rotary_factor is not supported")
    context_length = raw.get("max_position_embeddings", 2048)
    original = int(values.get("original_max_position_embeddings") or context_length)
    factor = values.get("factor")
    if factor is None:
        factor = context_length / original if scaling == "yarn" else 1.0
    attention_factor = values.get("attention_factor")
    return RopeConfig(
        theta=float(values.get("rope_theta", raw.get("rope_theta", 10000.0))),
        scaling=scaling,
        factor=float(factor),
        original_context_length=original,
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        beta_fast=float(values.get("beta_fast") or 32),
        beta_slow=float(values.get("beta_slow") or 1),
        truncate=bool(values.get("truncate", True)),
        mscale=float(values.get("mscale") or 0.0),
        mscale_all_dim=float(values.get("mscale_all_dim") or 0.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
    )


def _eos(value: Any) -> tuple[int, ...]:
    """A checkpoint names no end token, one, or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
