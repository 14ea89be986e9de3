"""ModelConfig: the engine's and the model classes' view of a checkpoint's configuration."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from sgl_aspects.errors import ModelLoadError
from sgl_aspects.platforms import resolve_qualified_name

ROPE_SCALINGS = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")

#: Architecture, as config.json names it, to the qualified name of its class here.
MODELS: dict[str, str] = {
    "DeepseekV2ForCausalLM": "sgl_aspects.runtime.models.deepseek:DeepseekForCausalLM",
    "DeepseekV3ForCausalLM": "sgl_aspects.runtime.models.deepseek:DeepseekForCausalLM",
    "DeepseekV32ForCausalLM": "sgl_aspects.runtime.models.deepseek:DeepseekForCausalLM",
    "GemmaForCausalLM": "sgl_aspects.runtime.models.llama:LlamaForCausalLM",
    "LlamaForCausalLM": "sgl_aspects.runtime.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "sgl_aspects.runtime.models.llama:LlamaForCausalLM",
    "Qwen3ForCausalLM": "sgl_aspects.runtime.models.llama:LlamaForCausalLM",
    "Qwen3MoeForCausalLM": "sgl_aspects.runtime.models.llama:LlamaForCausalLM",
}

_Config = TypeVar("_Config")
_KINDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "int": ("a whole number", operator.index),
    "float": ("a number", float),
    "bool": ("true or false", bool),
    "str": ("a text", str),
}


def key(*names: str, default: Any = MISSING) -> Any:
    """Declare a field that has one of these names in config.json, and not its own."""
    return field(default=default, metadata={"keys": names})


def read(cls: type[_Config], raw: Mapping[str, Any], **known: Any) -> _Config:
    """Make a ``cls`` from the keys of ``raw``; ``known`` has the fields that need more than one key.

    KeyError if a required key is missing; ModelLoadError if it has a wrong value.
    """
    for each in fields(cls):  # type: ignore[arg-type]
        names = each.metadata.get("keys", (each.name,))
        name = next((name for name in names if name in raw), names[0])
        kind, convert = _KINDS.get(str(each.type).partition(" ")[0], ("", None))
        if each.name in known or convert is None:
            continue
        if name in raw:
            try:
                known[each.name] = convert(raw[name])
            except (TypeError, ValueError, OverflowError) as error:
                raise ModelLoadError(f"{name}={raw[name]!r}: {kind} is needed") from error
            at_least = 0 if each.default in (0, 1) else 1  # fields that may also be 0
            if convert is operator.index and known[each.name] < at_least:
                raise ModelLoadError(f"{name}={raw[name]!r}: at least {at_least} is needed")
        elif each.default is MISSING:
            raise KeyError(name)
    return cls(**known)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions. ``scaling`` is one of ROPE_SCALINGS; the rest belongs to one or the other."""

    theta: float = key("rope_theta", default=10000.0)
    scaling: str = key("rope_type", "type", default="default")
    factor: float = 1.0
    original_context_length: int = key("original_max_position_embeddings", default=8192)
    #: llama3.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: yarn. The mscales set how much attention is sharpened; attention_factor, if given, sets it directly.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    #: One for each frequency, as GGUF files carry the llama3 scaling; empty for none.
    frequency_divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require("rope scaling", self.scaling, ROPE_SCALINGS)
        if not (self.theta > 0 and self.factor > 0):
            raise ModelLoadError(f"rope_theta={self.theta}, factor={self.factor}: both must be above 0")


@dataclass(frozen=True)
class MoEConfig:
    """Experts instead of an MLP."""

    num_experts: int = key("num_experts", "num_local_experts", "n_routed_experts")
    experts_per_token: int = key("num_experts_per_tok")
    #: Inner size of one expert.
    intermediate_size: int = key("moe_intermediate_size")
    #: Layers with a plain MLP instead.
    dense_layers: frozenset[int] = frozenset()
    num_shared_experts: int = key("n_shared_experts", default=0)
    #: "softmax" over all experts, or the "sigmoid" of each.
    scoring: str = "softmax"
    #: Whether a token's weights are made to sum to 1, and what they are multiplied with then.
    normalize: bool = key("norm_topk_prob", default=False)
    scaling_factor: float = key("routed_scaling_factor", default=1.0)
    #: Only experts of the ``topk_groups`` best groups are chosen from. A group is as good as its best expert,
    #: or (``group_by_top2``) the sum of its best two.
    num_groups: int = key("n_group", default=1)
    topk_groups: int = key("topk_group", default=1)
    group_by_top2: bool = False
    #: Whether the checkpoint has a bias that counts in choosing, not in weighing.
    has_correction_bias: bool = False
    #: Whether the router computes in float32 whatever the model's type.
    float32_router: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ModelLoadError(f"{self.experts_per_token} of {self.num_experts} experts cannot be chosen")
        if self.num_groups > 1 and self.num_experts % self.num_groups:
            raise ModelLoadError(f"{self.num_experts} experts cannot be put into {self.num_groups} groups")


@dataclass(frozen=True)
class IndexerConfig:
    """Sparse attention: a token reads only the ``topk`` tokens that the indexer finds best."""

    num_heads: int = key("index_n_heads")
    head_dim: int = key("index_head_dim")
    topk: int = key("index_topk")


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention: keys and values of all heads come from one compressed row a token."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    #: None: queries are not compressed.
    q_lora_rank: int | None = None
    #: Rotary pairs are neighbours (0, 1), not halves (0, dim / 2).
    interleaved: bool = key("rope_interleave", default=True)
    indexer: IndexerConfig | None = None


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int = key("num_hidden_layers")
    num_heads: int = key("num_attention_heads")
    num_kv_heads: int = key("num_key_value_heads")
    head_dim: int = key("head_dim")
    context_length: int = key("max_position_embeddings", default=2048)
    rms_norm_eps: float = 1e-6
    #: The type that the weights were saved in: one of DTYPES.
    dtype: str = key("dtype", "torch_dtype", default="float32")
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    #: Of queries, keys and values; and of the projection after attention.
    attention_bias: bool = False
    attention_output_bias: bool = False
    #: Whether each head's queries and keys are normalized.
    qk_norm: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    eos_token_ids: tuple[int, ...] = ()
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    #: Whether norms multiply with 1 + weight.
    norm_adds_one: bool = False
    #: The factor of embeddings.
    embedding_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.rotary_dim % 2:
            raise ModelLoadError(f"{self.rotary_dim} rotated numbers of a head: there must be pairs of them")
        _require("hidden_act", self.hidden_act, ("silu", "gelu_pytorch_tanh"))
        _require("dtype", self.dtype, DTYPES)

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def kv_kind(self) -> str:
        """The kind of key-value pool: "mha", "mla" or "dsa"."""
        if self.mla is None:
            return "mha"
        return "mla" if self.mla.indexer is None else "dsa"

    def kv_row(self, num_ranks: int = 1) -> dict[str, int]:
        """The sizes that a pool of this kind is made with, on each rank."""
        if self.mla is None:
            return {"head_num": max(self.num_kv_heads // num_ranks, 1), "head_dim": self.head_dim}
        row = {"kv_lora_rank": self.mla.kv_lora_rank, "qk_rope_head_dim": self.mla.qk_rope_head_dim}
        if self.mla.indexer is None:
            return row
        return {**row, "kv_cache_dim": sum(row.values()), "index_head_dim": self.mla.indexer.head_dim}


def model_class(architecture: str) -> Any:
    """Return the class of an architecture in MODELS, which is imported now."""
    return resolve_qualified_name(MODELS[architecture])


def _require(name: str, value: str, supported: tuple[str, ...]) -> None:
    if value not in supported:
        raise ModelLoadError(f"{name} {value!r} is not supported; known: {', '.join(supported)}")
