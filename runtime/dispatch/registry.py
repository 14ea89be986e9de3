"""OpRegistry: every operator, and every implementation of it that is known."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sgl_aspects.errors import OperatorError, OperatorSignatureError
from sgl_aspects.runtime.dispatch.types import ImplKind, OpImpl


@dataclass(frozen=True)
class OperatorSpec:
    """An operator: its reference says what it computes and what its arguments are called."""

    name: str
    reference: Callable[..., Any]
    #: Arguments that every implementation writes to.
    mutates: tuple[str, ...] = ()
    #: The argument whose dtype and device decide which implementation serves a call.
    keyed_by: str = ""

    def __post_init__(self) -> None:
        parameters = list(inspect.signature(self.reference).parameters)
        if not self.keyed_by:
            object.__setattr__(self, "keyed_by", parameters[0])
        for name in (*self.mutates, self.keyed_by):
            if name not in parameters:
                raise OperatorError(f"operator {self.name}: {name!r} is none of its arguments {parameters}")

    @property
    def key_index(self) -> int:
        return list(inspect.signature(self.reference).parameters).index(self.keyed_by)

    def check_signature(self, impl: OpImpl) -> None:
        """The reference's parameters under their names and in their order; more only with defaults.

        :raises OperatorSignatureError: says what differs.
        """
        if impl.takes_layer:
            return
        wanted = inspect.signature(self.reference)
        try:
            found = inspect.signature(impl.fn)
        except (TypeError, ValueError):  # a builtin that tells nothing of itself
            return
        parameters = list(found.parameters.values())
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
            return
        names = [parameter.name for parameter in parameters]
        extra = parameters[len(wanted.parameters) :]
        if names[: len(wanted.parameters)] != list(wanted.parameters) or any(
            parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
            for parameter in extra
        ):
            raise OperatorSignatureError(
                f"{impl.impl_id} is {impl.fn.__module__}.{impl.fn.__qualname__}{found}, and operator "
                f"{self.name} is called with {wanted}: take these arguments in this order, and others only "
                f"with a default"
            )


class OpRegistry:
    """Safe to use from several threads; a reader sees a registration whole or not at all."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._specs: dict[str, OperatorSpec] = {}
        self._impls: dict[str, tuple[OpImpl, ...]] = {}
        self._listeners: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()

    def on_change(self, who: Any, do: Callable[[Any], None]) -> None:
        """Call ``do(who)`` after each registration, as long as ``who`` lives."""
        self._listeners[who] = do

    def _changed(self) -> None:
        for who, do in list(self._listeners.items()):
            do(who)

    def define(self, spec: OperatorSpec) -> None:
        """A new operator, with its reference as its first implementation."""
        with self._lock:
            if spec.name in self._specs:
                raise OperatorError(f"operator {spec.name!r} is defined already")
            self._specs[spec.name] = spec
            self._impls[spec.name] = ()
            self.register(OpImpl(spec.name, f"reference.{spec.name}", ImplKind.REFERENCE, spec.reference))

    def register(self, impl: OpImpl) -> None:
        """Add an implementation.

        :raises OperatorError: of an unknown operator, or with an ``impl_id`` that is taken.
        :raises OperatorSignatureError: its function takes other arguments than the operator.
        """
        with self._lock:
            spec = self.spec(impl.op_name)
            spec.check_signature(impl)
            arguments = list(inspect.signature(spec.reference).parameters)
            for name in impl.mutates:
                if name not in arguments:
                    raise OperatorError(
                        f"{impl.impl_id}: mutates={name!r}; {impl.op_name} has the arguments "
                        f"{', '.join(arguments)}"
                    )
            known = self._impls[impl.op_name]
            if any(other.impl_id == impl.impl_id for other in known):
                raise OperatorError(
                    f"{impl.impl_id!r} is registered for {impl.op_name} already: give each implementation an "
                    f"id of its own, or unregister the first"
                )
            self._impls[impl.op_name] = (*known, impl)
        self._changed()

    def unregister(self, op_name: str, impl_id: str) -> None:
        """Take an implementation out again. The reference stays."""
        with self._lock:
            kept = tuple(impl for impl in self.impls(op_name) if impl.impl_id != impl_id)
            if len(kept) == len(self._impls[op_name]):
                raise OperatorError(f"{impl_id!r} is no implementation of {op_name}")
            if not any(impl.kind is ImplKind.REFERENCE for impl in kept):
                raise OperatorError(f"{impl_id!r} is the reference of {op_name}: it stays")
            self._impls[op_name] = kept
        self._changed()

    def spec(self, op_name: str) -> OperatorSpec:
        """:raises OperatorError: no operator has this name; says which there are."""
        try:
            return self._specs[op_name]
        except KeyError:
            raise OperatorError(
                f"no operator is called {op_name!r}; there are {', '.join(sorted(self._specs))}"
            ) from None

    def impls(self, op_name: str) -> tuple[OpImpl, ...]:
        self.spec(op_name)
        return self._impls[op_name]

    def op_names(self) -> list[str]:
        return sorted(self._specs)

    def all_impls(self) -> Iterator[OpImpl]:
        for impls in list(self._impls.values()):
            yield from impls

    def vendors(self) -> set[str]:
        return {impl.vendor for impl in self.all_impls() if impl.vendor is not None}

    def renew_lock(self) -> None:
        """In a forked child: the parent's lock may be held by a thread that is not here."""
        self._lock = threading.RLock()
