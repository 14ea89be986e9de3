"""Operator dispatch: which implementation of an operator runs, chosen by a policy that can be read and
explained.

from sgl_aspects.runtime import dispatch
dispatch.rms_norm(x, weight, 1e-6)                     # what the policy chooses
with dispatch.with_preference("reference"): ...        # another policy, for a while
print(dispatch.get_manager().explain("rms_norm", x.dtype, x.device))

The modules, in the order to read them:

    types                         what an operator is, an implementation of one, a token in an order
    operators, reference/         the twelve, as functions; what each of them means, in PyTorch
    registry                      all of them, with all implementations that are known
    policy, selection             what a person wants; which implementation that is for such tensors
    call_site, manager            a place that calls, down to a plain call; all places, kept up to date
    process                       the one manager of this process
    backends, flaggems, vendors/  where implementations come from
    configuration, live           what variables and files say; what `sgl-aspects ops` says to live processes
    shadow/                       two implementations compared, call by call, layer by layer, in graphs too
"""

from sgl_aspects.runtime.dispatch.manager import OpManager
from sgl_aspects.runtime.dispatch.operators import (
    chunk_gated_delta_rule,
    embedding,
    fused_moe,
    fused_recurrent_gated_delta_rule,
    gelu_and_mul,
    gemma_rms_norm,
    linear,
    mrotary_embedding,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
    topk,
)
from sgl_aspects.runtime.dispatch.policy import SelectionPolicy
from sgl_aspects.runtime.dispatch.process import (
    call_op,
    follow_requests,
    get_manager,
    policy_context,
    reset_manager,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from sgl_aspects.runtime.dispatch.registry import OpRegistry
from sgl_aspects.runtime.dispatch.types import ImplKind, OperatorSpec, OpImpl, Token

__all__ = [
    "ImplKind",
    "OpImpl",
    "OpManager",
    "OpRegistry",
    "OperatorSpec",
    "SelectionPolicy",
    "Token",
    "call_op",
    "chunk_gated_delta_rule",
    "embedding",
    "follow_requests",
    "fused_moe",
    "fused_recurrent_gated_delta_rule",
    "gelu_and_mul",
    "gemma_rms_norm",
    "get_manager",
    "linear",
    "mrotary_embedding",
    "policy_context",
    "reset_manager",
    "rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "topk",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]
