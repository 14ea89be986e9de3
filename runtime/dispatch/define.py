"""``@operator()``: turn a reference into an operator, whose calls run what the policy chooses.

Copies of it, imported by name or stored, follow the policy; it can be hooked, and compilers trace through it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from sgl_aspects import compat
from sgl_aspects.runtime.dispatch.types import OperatorSpec

_F = TypeVar("_F", bound=Callable[..., Any])

#: Every operator that was defined, by its name.
OPERATORS: dict[str, OperatorSpec] = {}


class _Operation:
    """The state of one operator: its call site, once the process has a manager."""

    def __init__(self, op_name: str) -> None:
        self.op_name = op_name
        self.site: Any = self

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Find the call site at the first call, so that importing an operator reads no configuration."""
        _find_sites()
        if not torch.compiler.is_compiling():
            self.site = _sites[self.op_name]
        return _sites[self.op_name].run(*args, **kwargs)

    def recover(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise error  # the configuration could not be read


_operations: list[_Operation] = []


def operator(*, mutates: tuple[str, ...] = (), keyed_by: str = "") -> Callable[[_F], _F]:
    """Define the operator that the decorated reference is named after; arguments as in OperatorSpec."""

    def define(reference: _F) -> _F:
        spec = OperatorSpec(reference.__name__, reference, mutates=mutates, keyed_by=keyed_by)
        OPERATORS[spec.name] = spec
        operation = _Operation(spec.name)
        _operations.append(operation)

        @functools.wraps(reference)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return operation.site.run(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  # raised again, or served by the next implementation
                return operation.site.recover(error, args, kwargs)

        return cast("_F", call)

    return define


#: Code being compiled finds the sites here: it may not change an operation.
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
    for operation in _operations:
        operation.site = operation
