"""ModelConfig: what the engine and the model classes need to know of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sgl_aspects.errors import ModelLoadError
from sgl_aspects.runtime.models.registry import known_architectures


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions. ``scaling`` is "default", "linear" or "llama3"; the rest belongs to those two."""

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192
    #: One for each frequency, as GGUF files carry the llama3 scaling; empty for none.
    frequency_divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    #: The type that the weights were saved in: "float32", "bfloat16" or "float16".
    dtype: str = "float32"
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "context_length",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ModelLoadError(f"the model's config says {name}={value!r}: a whole number is needed")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim={self.head_dim}: rotary positions need an even number")
        if self.hidden_act != "silu":
            raise ModelLoadError(f"hidden_act={self.hidden_act!r} is not supported; supported: silu")


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
    try:
        heads = raw["num_attention_heads"]
        hidden_size = raw["hidden_size"]
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
            attention_bias=bool(raw.get("attention_bias", False)),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            hidden_act=raw.get("hidden_act", "silu"),
            eos_token_ids=_eos(generation.get("eos_token_id", raw.get("eos_token_id"))),
        )
    except KeyError as missing:
        raise ModelLoadError(f"{source} lacks the key {missing}") from missing
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelLoadError(f"{source} holds a value of the wrong type: {error}") from error


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
    if scaling not in ("default", "linear", "llama3"):
        raise ModelLoadError(
            f"{source}: rope scaling {scaling!r} is not supported; known: default, linear, llama3"
        )
    if values.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelLoadError(f"{source}: partial_rotary_factor is not supported")
    context_length = raw.get("max_position_embeddings", 2048)
    return RopeConfig(
        theta=float(values.get("rope_theta", raw.get("rope_theta", 10000.0))),
        scaling=scaling,
        factor=float(values.get("factor", 1.0)),
        low_freq_factor=float(values.get("low_freq_factor", 1.0)),
        high_freq_factor=float(values.get("high_freq_factor", 4.0)),
        original_context_length=int(values.get("original_max_position_embeddings", context_length)),
    )


def _eos(value: Any) -> tuple[int, ...]:
    """A checkpoint names no end token, one, or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
