"""The operators: a function each, defined by a reference in plain PyTorch for every device.

A module in this folder defines its operators by being imported, and all of them are imported here.
"""

import importlib
import pkgutil

from sgl_aspects.runtime.dispatch.operators.delta_rule import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from sgl_aspects.runtime.dispatch.operators.dense import (
    embedding,
    gelu_and_mul,
    gemma_rms_norm,
    linear,
    rms_norm,
    silu_and_mul,
)
from sgl_aspects.runtime.dispatch.operators.experts import fused_moe, grouped_topk, topk
from sgl_aspects.runtime.dispatch.operators.rotary import mrotary_embedding, rotary_embedding

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
del _module

__all__ = [
    "chunk_gated_delta_rule",
    "embedding",
    "fused_moe",
    "fused_recurrent_gated_delta_rule",
    "gelu_and_mul",
    "gemma_rms_norm",
    "grouped_topk",
    "linear",
    "mrotary_embedding",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "topk",
]
