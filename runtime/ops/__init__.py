"""The layers that models are made of: each calls a functional operator of ``runtime/dispatch``."""

from sgl_aspects.runtime.ops.base import Operator
from sgl_aspects.runtime.ops.dense import Embedding, GeluAndMul, Linear, SiluAndMul
from sgl_aspects.runtime.ops.moe import FusedExperts, TopKExperts
from sgl_aspects.runtime.ops.norm import GemmaRMSNorm, RMSNorm
from sgl_aspects.runtime.ops.parallel import ColumnParallelLinear, MergedLinear, RowParallelLinear
from sgl_aspects.runtime.ops.rotary import RotaryEmbedding

__all__ = [
    "ColumnParallelLinear",
    "Embedding",
    "FusedExperts",
    "GeluAndMul",
    "GemmaRMSNorm",
    "Linear",
    "MergedLinear",
    "Operator",
    "RMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SiluAndMul",
    "TopKExperts",
]
