"""The operators that models are written on: a PyTorch reference each, and faster forms for some platforms."""

from sgl_aspects.runtime.ops.activation import SiluAndMul
from sgl_aspects.runtime.ops.attention import Attention
from sgl_aspects.runtime.ops.base import Operator
from sgl_aspects.runtime.ops.embedding import Embedding
from sgl_aspects.runtime.ops.linear import Linear
from sgl_aspects.runtime.ops.moe import FusedExperts, TopKExperts
from sgl_aspects.runtime.ops.norm import RMSNorm
from sgl_aspects.runtime.ops.parallel import ColumnParallelLinear, MergedLinear, RowParallelLinear
from sgl_aspects.runtime.ops.rotary import Angles, RotaryEmbedding


def layer_class(op_name: str) -> type[Operator] | None:
    """The layer of the runtime that runs this operator; None: no layer does."""
    return next((cls for cls in _LAYERS if cls.op_name == op_name), None)


_LAYERS = (Embedding, FusedExperts, Linear, RMSNorm, RotaryEmbedding, SiluAndMul, TopKExperts)

__all__ = [
    "Angles",
    "Attention",
    "ColumnParallelLinear",
    "Embedding",
    "FusedExperts",
    "Linear",
    "MergedLinear",
    "Operator",
    "RMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SiluAndMul",
    "TopKExperts",
    "layer_class",
]
