"""The operators, as functions: ``rms_norm(x, weight)`` runs what the policy chooses.

Each has a reference, which says what it computes. The function is generated Python with the reference's
signature, so that a call packs no arguments, compilers see through it, and it may be held, imported by name
and hooked: it follows the policy wherever it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast, get_type_hints

import torch

from sgl_aspects.runtime.dispatch.reference import delta_rule, dense, experts, rotary
from sgl_aspects.runtime.dispatch.types import OperatorSpec

_F = TypeVar("_F", bound=Callable[..., Any])

#: All of them, by the functions at the end of this file.
OPERATORS: list[OperatorSpec] = []

_BODY = """
def {name}({signature}):
    try:
        return _site_{name}.run({names})
    except Exception as error:
        return _site_{name}.recover(error, ({names},), {{}})
"""


class _Unbound:
    """Stands for the site until the first call: nothing is configured before an operator is used."""

    def __init__(self, op_name: str) -> None:
        self.op_name = op_name

    def run(self, *args: Any) -> Any:
        _find_sites()
        if not torch.compiler.is_compiling():
            globals()[f"_site_{self.op_name}"] = _found_sites[self.op_name]
        return _found_sites[self.op_name].run(*args)

    def recover(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise error  # a configuration that cannot be read


#: A compiler may meet no change of the globals that it traces: it finds the sites in here.
_found_sites: dict[str, Any] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _find_sites() -> bool:
    """A compiler does this for real while it compiles."""
    from sgl_aspects.runtime.dispatch.process import get_manager

    if not _found_sites:
        manager = get_manager()
        _found_sites.update({spec.name: manager.function_site(spec.name) for spec in OPERATORS})
    return True


def unbind() -> None:
    """Ask for the process's manager again at the next call."""
    _found_sites.clear()
    for spec in OPERATORS:
        globals()[f"_site_{spec.name}"] = _Unbound(spec.name)


def _operator(reference: _F, **options: Any) -> _F:
    """The function of the operator that the reference is named after; ``options`` of its OperatorSpec."""
    spec = OperatorSpec(reference.__name__, reference, **options)
    OPERATORS.append(spec)
    signature, names = spec.written_signature()
    source = _BODY.format(name=spec.name, signature=signature, names=names)
    # In this module's own namespace: compilers look a function's globals up by its module's name.
    exec(compile(source, f"<operator {spec.name}>", "exec"), globals())
    function = globals()[spec.name]
    function.__doc__ = reference.__doc__
    function.__annotations__ = get_type_hints(reference)
    return cast("_F", function)


silu_and_mul = _operator(dense.silu_and_mul)
gelu_and_mul = _operator(dense.gelu_and_mul)
rms_norm = _operator(dense.rms_norm)
gemma_rms_norm = _operator(dense.gemma_rms_norm)
linear = _operator(dense.linear)
embedding = _operator(dense.embedding, keyed_by="weight")
rotary_embedding = _operator(rotary.rotary_embedding)
mrotary_embedding = _operator(rotary.mrotary_embedding)
topk = _operator(experts.topk)
fused_moe = _operator(experts.fused_moe)
chunk_gated_delta_rule = _operator(delta_rule.chunk_gated_delta_rule)
fused_recurrent_gated_delta_rule = _operator(delta_rule.fused_recurrent_gated_delta_rule, mutates=("state",))

unbind()
