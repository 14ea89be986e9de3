"""ModelConfig from the config.json of a Hugging Face checkpoint: keys that need interpretation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_aspects.errors import ModelLoadError
from sgl_aspects.runtime.loader.model_config import (
    MODELS,
    IndexerConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
    read,
)

#: More layers than any model has: a mistake, which would take long to load.
_MOST_LAYERS = 4096


def config_from_hugging_face(
    raw: Mapping[str, Any], generation: Mapping[str, Any], source: str
) -> ModelConfig:
    """Read ``config.json`` (and the end tokens of ``generation_config.json``); ``source`` is for messages."""
    try:
        return _config(_given(raw), _given(generation))
    except ModelLoadError as error:
        raise ModelLoadError(f"{source}: {error}") from error
    except KeyError as missing:
        raise ModelLoadError(f"{source} lacks the key {missing}") from missing
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelLoadError(f"{source} holds a value of the wrong type: {error}") from error


def _given(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Drop null values, which are the same as missing keys."""
    return {name: value for name, value in raw.items() if value is not None}


def _config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelConfig:
    architectures = raw.get("architectures") or ["(none)"]
    architecture = next((name for name in architectures if name in MODELS), None)
    if architecture is None:
        raise ModelLoadError(
            f"architecture {', '.join(map(str, architectures))} is not supported; "
            f"known: {', '.join(MODELS)}. Other engines run more, with the same hooks"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "?")
        raise ModelLoadError(
            f"quantization_config ({method}) is not supported; use the unquantized checkpoint"
        )
    if raw.get("use_sliding_window"):
        raise ModelLoadError("use_sliding_window is not supported")
    layers = raw.get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise ModelLoadError(f"num_hidden_layers={layers}: more than {_MOST_LAYERS} are not supported")
    is_gemma = architecture == "GemmaForCausalLM"
    if is_gemma:
        raw["hidden_act"] = "gelu_pytorch_tanh"  # also if an older file has gelu
        raw.setdefault("tie_word_embeddings", True)
    is_qwen2 = architecture.startswith("Qwen2")
    biased = bool(raw.get("attention_bias"))
    heads, size = raw.get("num_attention_heads"), raw.get("hidden_size")
    raw.setdefault("num_key_value_heads", heads)
    if isinstance(heads, int) and isinstance(size, int):
        raw.setdefault("head_dim", size // heads)
    return read(
        ModelConfig,
        raw,
        architecture=architecture,
        rope=_rope(raw),
        norm_adds_one=is_gemma,
        embedding_scale=raw["hidden_size"] ** 0.5 if is_gemma else 1.0,
        # Qwen2's biases are not in its config: always there, and never after attention.
        attention_bias=biased or is_qwen2,
        attention_output_bias=biased and not is_qwen2,
        qk_norm=architecture.startswith("Qwen3"),
        eos_token_ids=_eos(generation.get("eos_token_id", raw.get("eos_token_id"))),
        moe=_moe(raw, architecture),
        mla=_mla(raw, architecture),
    )


def _moe(raw: dict[str, Any], architecture: str) -> MoEConfig | None:
    if architecture == "Qwen3MoeForCausalLM":
        return read(MoEConfig, raw, dense_layers=_dense_layers(raw))
    if not architecture.startswith("Deepseek") or not raw.get("n_routed_experts"):
        return None
    is_v2 = architecture == "DeepseekV2ForCausalLM"
    known: dict[str, Any] = {"normalize": False} if is_v2 else {}
    if is_v2 and raw.get("topk_method") != "group_limited_greedy":
        known |= {"num_groups": 1, "topk_groups": 1}
    return read(
        MoEConfig,
        raw,
        dense_layers=_dense_layers(raw),
        scoring="softmax" if is_v2 else "sigmoid",
        group_by_top2=not is_v2,
        has_correction_bias=not is_v2,
        float32_router=True,
        **known,
    )


def _dense_layers(raw: dict[str, Any]) -> frozenset[int]:
    """Return the dense layers, from a list of all layers' types, DeepSeek's keys, or Qwen3's."""
    layers = range(raw["num_hidden_layers"])
    types = raw.get("mlp_layer_types")
    if types:
        return frozenset(i for i in layers if types[i] == "dense")
    first, frequency = raw.get("first_k_dense_replace", 0), raw.get("moe_layer_freq", 1)
    plain, step = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step", 1)
    return frozenset(i for i in layers if i < first or i % frequency or i in plain or (i + 1) % step)


def _mla(raw: dict[str, Any], architecture: str) -> MLAConfig | None:
    if not architecture.startswith("Deepseek"):
        return None
    has_indexer = architecture == "DeepseekV32ForCausalLM"
    return read(MLAConfig, raw, indexer=read(IndexerConfig, raw) if has_indexer else None)


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """``rope_parameters`` in newer files; ``rope_theta`` and ``rope_scaling`` in older ones."""
    context_length = raw.get("max_position_embeddings", 2048)
    values = {
        "rope_theta": raw.get("rope_theta", 10000.0),
        "original_max_position_embeddings": context_length,
        **_given(raw.get("rope_scaling", {})),
        **_given(raw.get("rope_parameters", {})),
    }
    if values.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelLoadError("partial_rotary_factor is not supported")
    if values.get("rope_type", values.get("type")) == "yarn":
        values.setdefault("factor", context_length / values["original_max_position_embeddings"])
    return read(RopeConfig, values)


def _eos(value: Any) -> tuple[int, ...]:
    """A checkpoint names no end token, one, or a list."""
    if value is None:
        return ()
    return tuple(dict.fromkeys(map(int, value if isinstance(value, list) else [value])))
