"""ModelConfig: what the engine and the model classes need to know of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

from sgl_aspects.errors import ModelLoadError

ROPE_SCALINGS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions. ``scaling`` is one of ROPE_SCALINGS; the rest belongs to one or the other."""

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    original_context_length: int = 8192
    #: llama3.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: yarn. The mscales say how much attention is sharpened; attention_factor, where given, says it outright.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    #: One for each frequency, as GGUF files carry the llama3 scaling; empty for none.
    frequency_divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class MoEConfig:
    """Experts in the place of an MLP."""

    num_experts: int
    experts_per_token: int
    #: Inner size of one expert.
    intermediate_size: int
    #: Layers that have a plain MLP all the same.
    dense_layers: frozenset[int] = frozenset()
    num_shared_experts: int = 0
    #: "softmax" over all experts, or the "sigmoid" of each.
    scoring: str = "softmax"
    #: Whether a token's weights are made to sum to 1, and what they are multiplied with then.
    normalize: bool = False
    scaling_factor: float = 1.0
    #: Only experts of the ``topk_groups`` best groups are chosen from. A group is as good as its best expert,
    #: or (``group_by_top2``) the sum of its best two.
    num_groups: int = 1
    topk_groups: int = 1
    group_by_top2: bool = False
    #: Whether the checkpoint has a bias that counts in choosing, not in weighing.
    has_correction_bias: bool = False
    #: Whether the router computes in float32 whatever the model's type.
    float32_router: bool = False


@dataclass(frozen=True)
class IndexerConfig:
    """Sparse attention: a token reads only the ``topk`` tokens that the indexer finds best."""

    num_heads: int
    head_dim: int
    topk: int


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
    interleaved: bool = True
    indexer: IndexerConfig | None = None


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
        """The sizes that a pool of this kind is made with, on each of so many ranks."""
        if self.mla is None:
            return {"head_num": max(self.num_kv_heads // num_ranks, 1), "head_dim": self.head_dim}
        row = {"kv_lora_rank": self.mla.kv_lora_rank, "qk_rope_head_dim": self.mla.qk_rope_head_dim}
        return row if self.mla.indexer is None else {**row, "index_head_dim": self.mla.indexer.head_dim}
