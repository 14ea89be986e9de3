"""How compiled code tells of its calls: one operator of torch that compilers do not look into.

Inside a compiled graph nothing of ours runs. While a watch is on, each watched call is followed in the graph
by ``sgl_aspects::look``, which gets the call's tensors when the graph runs, and the rest of its arguments as
a text. Compilers keep it because it says that it writes to something, and break no graph for it.
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
    """Who is told of the calls that were compiled under its number."""

    def look_compiled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[torch.Tensor]
    ) -> None: ...


_looking: weakref.WeakValueDictionary[int, Looks] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_NAME = "look"
#: Goes, and the operator with it, when the module is loaded anew.
_library: Any = torch.library.Library("sgl_aspects", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"{_NAME}(Tensor(a!) number, Tensor[] given, Tensor[] found, str call) -> ()")


def numbered(who: Looks) -> torch.Tensor:
    """Compiled code holds on to the number, and never to ``who``. As a tensor, which compilers take for an
    input: layers of one kind share their code. The operator says that it writes to it, and does not."""
    number = next(_numbers)
    _looking[number] = who
    with torch.inference_mode(False):  # whatever mode compiled code runs in may write to it
        return torch.tensor(number, device="cpu")


def tell(
    number: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[torch.Tensor]
) -> None:
    """In code that is being compiled: whenever it runs, whoever has the number looks at this call."""
    given = tensors_in((args, kwargs))
    names = list(kwargs)
    call = repr((names, [_described(value) for value in (*args, *kwargs.values())]))
    getattr(torch.ops.sgl_aspects, _NAME)(number, given, found, call)


def _look(number: torch.Tensor, given: list[torch.Tensor], found: list[torch.Tensor], call: str) -> None:
    who = _looking.get(int(number))
    if who is None:  # the watch has ended, and compiled code that knew it still runs
        return
    tensors = iter(given)
    names, described = ast.literal_eval(call)
    values = [_rebuilt(each, tensors) for each in described]
    count = len(values) - len(names)
    who.look_compiled(tuple(values[:count]), dict(zip(names, values[count:])), found)


_library.impl(_NAME, _look, "CompositeExplicitAutograd")
torch.library.register_fake(f"sgl_aspects::{_NAME}", lambda *_: None, lib=_library)


def _described(value: Any) -> Any:
    """A value without its tensors, in what ``repr`` writes and ``literal_eval`` reads."""
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
    if kind == "value":
        return rest[0]
    name, parts = rest
    values = tuple(_rebuilt(part, tensors) for part in parts)
    return resolve_qualified_name(name)(*values) if name else values
