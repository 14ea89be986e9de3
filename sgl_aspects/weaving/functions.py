"""Woven functions: a generated function that stands for a target, and what steers it.

The function that stands in the engine keeps its identity while hooks come and go: only its ``__code__``
changes, so every binding to it stays good.
"""

from __future__ import annotations

import builtins
import inspect
import sys
import types
from typing import Any

from sgl_aspects.weaving.chain import NativeLink
from sgl_aspects.weaving.codegen import (
    CELLS,
    MAX_FLAT_OBSERVERS,
    FunctionKind,
    Shape,
    Signature,
    filled,
    variant,
)

Observers = tuple[tuple[Any, Any, Any], ...]
"""(enter, exit, failed) for each observer, outermost first; ``failed(error)`` returns itself."""


class WovenFunction:
    """A generated function and the cells that steer it.

    :param original: the function whose name, documentation and attributes it carries on.
    :param signature: for a callable that is no function: what the generated one accepts.
    """

    def __init__(self, original: Any, signature: Signature | None = None) -> None:
        self.kind = FunctionKind.of(original)
        self.signature = signature or Signature.of(original)
        self.steered = False
        self._cells = {name: types.CellType() for name in CELLS}
        self._cells["calls"].cell_contents = 0.0
        self._flags = _code_flags(original) & inspect.CO_ITERABLE_COROUTINE
        if signature is None:
            self._like(original)
        else:
            self._make({"__name__": __name__, "__builtins__": builtins}, "call", "call")

    @property
    def calls(self) -> int:
        return int(self._cells["calls"].cell_contents)

    def own_containers(self) -> list[Any]:
        """Everything of ours that holds the original on purpose."""
        return [self.__dict__, self._cells, self.function.__dict__, *self._cells.values()]

    def steer(
        self,
        head: Any,
        observers: Observers,
        *,
        signature: Signature | None = None,
        compiling: Any = None,
    ) -> None:
        """Swap the hooks: from the next call on, ``head`` and ``observers`` are what runs.

        :param observers: (enter, exit, failed) triples, outermost first; ``failed(error)`` returns itself.
        :param signature: the parameters to accept, where a REPLACE hook changed them.
        :param compiling: torch's ``is_compiling``, once torch.compile is loaded in this process.
        """
        if compiling is not None:
            self._cells["compiling"].cell_contents = compiling
        self._cells["head"].cell_contents = head
        observers = _flattened(observers)
        packed = isinstance(head, NativeLink)
        hooks = {"chain": head.run if packed else head}
        for index, triple in enumerate(observers):
            hooks |= zip((f"enter{index}", f"exit{index}", f"failed{index}"), triple)
        shape = Shape(signature or self.signature, len(observers), compiling is not None, packed)
        self.function.__code__ = self._code(shape, hooks)
        self.steered = True

    def take_attributes(self, original: types.FunctionType) -> None:
        """Carry over what was set on ``original`` up to now."""
        _copy_attributes(original, self.function)
        self.function.__dict__["__wrapped__"] = original

    def give_attributes(self, original: types.FunctionType) -> None:
        """Hand back what was set on our function while it stood in the place of ``original``."""
        _copy_attributes(self.function, original)

    def _like(self, original: types.FunctionType) -> None:
        code = original.__code__
        function = self._make(original.__globals__, code.co_name, getattr(code, "co_qualname", ""))
        function.__name__ = original.__name__
        function.__qualname__ = original.__qualname__
        function.__module__ = original.__module__
        function.__doc__ = original.__doc__
        function.__defaults__ = original.__defaults__
        function.__kwdefaults__ = dict(original.__kwdefaults__) if original.__kwdefaults__ else None
        function.__annotations__ = original.__annotations__
        if hasattr(original, "__type_params__"):  # Python 3.12
            function.__type_params__ = original.__type_params__  # type: ignore[attr-defined]
        self.take_attributes(original)

    def _make(self, namespace: dict[str, Any], name: str, qualname: str) -> types.FunctionType:
        # Under the target's own name, so that profiles and tracebacks read as before.
        self._identity: dict[str, Any] = {"co_name": name}
        if sys.version_info >= (3, 11):
            self._identity["co_qualname"] = qualname
        code = self._code(Shape(self.signature), {})
        # Free variables are our cell names with a prefix, sorted by the compiler.
        closure = tuple(self._cells[cell.lstrip("_")] for cell in code.co_freevars)
        self.function = types.FunctionType(code, namespace, name, None, closure)
        return self.function

    def _code(self, shape: Shape, hooks: dict[str, Any]) -> types.CodeType:
        code = variant(self.kind, shape)
        # `await` takes a generator only with the flag that types.coroutine sets.
        return filled(code, hooks, co_flags=code.co_flags | self._flags, **self._identity)


def _copy_attributes(source: types.FunctionType, target: types.FunctionType) -> None:
    for name in target.__dict__.keys() - source.__dict__.keys() - {"__wrapped__"}:
        del target.__dict__[name]
    for name, value in list(source.__dict__.items()):
        if name != "__wrapped__":
            target.__dict__[name] = value


def _code_flags(function: Any) -> int:
    return function.__code__.co_flags if isinstance(function, types.FunctionType) else 0


class _Merged:
    """Several observers as one."""

    def __init__(self, triples: Observers) -> None:
        self.triples = triples

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        tokens = []
        for enter, _, failed in self.triples:
            try:
                tokens.append(enter(args, kwargs))
            except Exception as error:  # noqa: BLE001  an observer never breaks the call
                tokens.append(failed(error))
        return tokens

    def exit(self, tokens: list[Any], result: Any, error: BaseException | None) -> None:
        for (_, leave, failed), token in reversed(list(zip(self.triples, tokens))):
            if token is failed:
                continue
            try:
                leave(token, result, error)
            except Exception as broken:  # noqa: BLE001  an observer never breaks the call
                failed(broken)


def _flattened(observers: Observers) -> Observers:
    """At most as many triples as are flattened: what is over is merged into the last of them."""
    if len(observers) <= MAX_FLAT_OBSERVERS:
        return observers
    rest = _Merged(observers[MAX_FLAT_OBSERVERS - 1 :])
    return (*observers[: MAX_FLAT_OBSERVERS - 1], (rest.enter, rest.exit, None))  # contains what they raise
