"""Calls in compiled code: reported by an operator of torch that compilers do not look into.

While a watch is on, each watched call is followed in the graph by ``sgl_aspects::look``. When the graph runs
it gets the call's tensors, and the rest of its arguments as a text. Compilers keep it, since it declares a
mutation, and do not break the graph for it.
"""

from __future__ import annotations

import ast
import itertools
import weakref
from typing import Any, Protocol

import torch

from sgl_aspects.errors import OperatorError
from sgl_aspects.platforms import resolve_qualified_name
from sgl_aspects.runtime.dispatch.shadow.comparing import tensors_in


class Looks(Protocol):
    """A record of the calls compiled under its number; ``layer`` is the module's number, or 0."""

    def look_compiled(
        self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[torch.Tensor]
    ) -> None: ...


_looking: weakref.WeakValueDictionary[int, Looks] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_NAME = "look"
#: Removes the operator when it is deleted, as when the module is reloaded.
_library: Any = torch.library.Library("sgl_aspects", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"{_NAME}(Tensor(a!) written, Tensor layer, Tensor[] given, Tensor[] found, str call) -> ()")


def numbered(who: Looks) -> int:
    """Return a number for ``who``, which compiled code keeps instead of a reference."""
    number = next(_numbers)
    _looking[number] = who
    return number


def record_call(
    number: int,
    written: torch.Tensor,
    layer: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: list[torch.Tensor],
) -> None:
    """Add to code being compiled: at each run, the watcher of the number gets this call."""
    values = (*args, *kwargs.values())
    # A number such as an epsilon may be symbolic here, without a text form: it is passed as a tensor.
    given = tensors_in(
        tuple(
            torch.scalar_tensor(value, dtype=torch.float64, device="cpu")
            if isinstance(value, float)
            else value
            for value in values
        )
    )
    call = repr(
        (
            number,
            list(kwargs),
            [_FLOAT if isinstance(value, float) else _described(value) for value in values],
        )
    )
    getattr(torch.ops.sgl_aspects, _NAME)(written, layer, given, found, call)


def _look(
    written: torch.Tensor,
    layer: torch.Tensor,
    given: list[torch.Tensor],
    found: list[torch.Tensor],
    call: str,
) -> None:
    number, names, described = ast.literal_eval(call)
    who = _looking.get(number)
    if who is None:  # the watch has ended, but the code compiled under it still runs
        return
    tensors = iter(given)
    values = [_rebuilt(each, tensors) for each in described]
    count = len(values) - len(names)
    who.look_compiled(int(layer), tuple(values[:count]), dict(zip(names, values[count:])), found)


_library.impl(_NAME, _look, "CompositeExplicitAutograd")
torch.library.register_fake(f"sgl_aspects::{_NAME}", lambda *_: None, lib=_library)


_FLOAT = ("float",)


def _described(value: Any) -> Any:
    """Return a value without its tensors, in a form that ``repr`` writes and ``literal_eval`` reads."""
    if isinstance(value, torch.Tensor):
        return ("tensor",)
    if isinstance(value, (tuple, list)):
        name = "" if type(value) in (tuple, list) else f"{type(value).__module__}:{type(value).__qualname__}"
        return ("tuple", name, [_described(part) for part in value])
    if value is None or isinstance(value, (bool, int, float, str)):
        return ("value", value)
    raise OperatorError(f"{value!r} in a call cannot be watched in compiled code: switch the watch off")


def _rebuilt(described: Any, tensors: Any) -> Any:
    kind, *rest = described
    if kind == "tensor":
        return next(tensors)
    if kind == "float":
        return next(tensors).item()
    if kind == "value":
        return rest[0]
    name, parts = rest
    values = tuple(_rebuilt(part, tensors) for part in parts)
    return resolve_qualified_name(name)(*values) if name else values
