"""Operator dispatch: which implementation of an operator runs, chosen by a policy that can be read and
explained.

    from sgl_aspects.runtime import dispatch

    dispatch.rms_norm(x, weight, 1e-6)                     # runs the implementation that the policy chooses
    with dispatch.with_preference("reference"): ...        # another policy in the block
    print(dispatch.get_manager().explain("rms_norm", x.dtype, x.device))

A new operator is two files: a module in ``operators/`` with its reference, and an implementation of it, in
``triton/<operator>.py`` or in a vendor's ``register(registry)``. Layers call operators as functions.

The modules, in the order to read them:

    types                    operators, their implementations, tokens of an order
    define, operators/       turns functions into operators; the operators, with their references
    registry                 all operators and implementations
    policy, selection        the user's preferences; the implementation for given tensors
    call_site, manager       the target of an operator's calls; all call sites, kept up to date
    process                  the one manager of this process, and its control by `sgl-aspects ops`
    backends                 the sources of implementations: flaggems, triton/, vendors/
    configuration            variables and files
"""

from sgl_aspects.runtime.dispatch import operators
from sgl_aspects.runtime.dispatch.define import operator
from sgl_aspects.runtime.dispatch.manager import OpManager
from sgl_aspects.runtime.dispatch.operators import *  # noqa: F403
from sgl_aspects.runtime.dispatch.policy import SelectionPolicy
from sgl_aspects.runtime.dispatch.process import (
    call_op,
    get_manager,
    policy_context,
    reset_manager,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from sgl_aspects.runtime.dispatch.registry import OpRegistry
from sgl_aspects.runtime.dispatch.types import ImplKind, OperatorSpec, OpImpl, Token, on_platform

__all__ = [
    "ImplKind",
    "OpImpl",
    "OpManager",
    "OpRegistry",
    "OperatorSpec",
    "SelectionPolicy",
    "Token",
    "call_op",
    "get_manager",
    "on_platform",
    "operator",
    "policy_context",
    "reset_manager",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]
__all__ += operators.__all__
