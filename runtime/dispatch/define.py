"""``@operator()``: turn a reference into an operator, whose calls run what the policy chooses.

The operator is a generated function with the reference's signature, so that a call packs no arguments and
compilers trace through it. Copies of it, imported by name or stored, follow the policy, and it can be hooked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast, get_type_hints

import torch

from sgl_aspects import compat, generated
from sgl_aspects.runtime.dispatch.types import OperatorSpec

_F = TypeVar("_F", bound=Callable[..., Any])

#: Every operator that was defined, by its name.
OPERATORS: dict[str, OperatorSpec] = {}

#: Operator → the globals of its module, which hold its call site.
_modules: dict[str, dict[str, Any]] = {}

_SOURCE = """
def {name}({signature}):
    try:
        return _site_of_{name}.run({names})
    except Exception as error:
        return _site_of_{name}.recover(error, ({names},), {{}})
"""


def operator(*, mutates: tuple[str, ...] = (), keyed_by: str = "") -> Callable[[_F], _F]:
    """Define the operator that the decorated reference is named after; arguments as in OperatorSpec."""

    def define(reference: _F) -> _F:
        spec = OperatorSpec(reference.__name__, reference, mutates=mutates, keyed_by=keyed_by)
        OPERATORS[spec.name] = spec
        # In the reference's own module: compilers look a function's globals up by its module's name.
        module = _modules[spec.name] = reference.__globals__
        module[_site_name(spec.name)] = _Unbound(spec.name)
        signature, names = spec.written_signature()
        source = _SOURCE.format(name=spec.name, signature=signature, names=names)
        function = generated.execute(source, f"operator {spec.name}", module)[spec.name]
        function.__doc__ = reference.__doc__
        function.__annotations__ = get_type_hints(reference)
        return cast("_F", function)

    return define


def _site_name(op_name: str) -> str:
    return f"_site_of_{op_name}"


class _Unbound:
    """The call site until the first call, so that importing an operator reads no configuration."""

    def __init__(self, op_name: str) -> None:
        self.op_name = op_name

    def run(self, *args: Any) -> Any:
        _find_sites()
        if not torch.compiler.is_compiling():
            _modules[self.op_name][_site_name(self.op_name)] = _sites[self.op_name]
        return _sites[self.op_name].run(*args)

    def recover(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise error  # the configuration could not be read


#: Code being compiled may not change a module's globals, and finds the sites here.
_sites: dict[str, Any] = {}


@compat.assume_constant_result
def _find_sites() -> bool:
    """Called by compilers while they compile."""
    from sgl_aspects.runtime.dispatch.process import get_manager

    if len(_sites) < len(OPERATORS):
        manager = get_manager()
        for spec in OPERATORS.values():
            if spec.name not in manager.registry:
                manager.registry.define(spec)
            _sites[spec.name] = manager.site(spec.name)
    return True


def unbind() -> None:
    """Look up the process's manager again at the next call."""
    _sites.clear()
    for name, module in _modules.items():
        module[_site_name(name)] = _Unbound(name)
