"""OpRegistry: every operator, and every implementation of it that is known."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sgl_aspects.errors import ConfigError, OperatorError
from sgl_aspects.runtime.dispatch.policy import SelectionPolicy
from sgl_aspects.runtime.dispatch.types import ImplKind, OperatorSpec, OpImpl, Token, check_choice

if TYPE_CHECKING:
    from sgl_aspects.runtime.dispatch.manager import OpManager


class OpRegistry:
    """Safe to use from several threads; a reader sees a registration whole or not at all."""

    def __init__(self) -> None:
        #: Held while anything changes; another one in a forked child.
        self.lock = threading.RLock()
        self._specs: dict[str, OperatorSpec] = {}
        self._impls: dict[str, tuple[OpImpl, ...]] = {}
        #: Managers, which choose again after each registration.
        self.users: weakref.WeakSet[OpManager] = weakref.WeakSet()

    def _changed(self) -> None:
        for manager in list(self.users):
            manager.choose_anew()

    def define(self, spec: OperatorSpec) -> None:
        """A new operator, with its reference as its first implementation."""
        with self.lock:
            if spec.name in self._specs:
                raise OperatorError(f"operator {spec.name!r} is defined already")
            self._specs[spec.name] = spec
            self._impls[spec.name] = ()
            self.register(OpImpl(spec.name, f"reference.{spec.name}", ImplKind.REFERENCE, spec.reference))

    def register(self, impl: OpImpl, *, replace: bool = False) -> None:
        """Add an implementation; with ``replace``, any of the same ``impl_id`` is removed.

        :raises OperatorError: of an unknown operator, or with an ``impl_id`` that is taken.
        :raises OperatorSignatureError: its function takes other arguments than the operator.
        """
        if not isinstance(impl, OpImpl):
            raise OperatorError(f"register({impl!r}): give an OpImpl")
        with self.lock:
            self.spec(impl.op_name).check_signature(impl)
            known = self._impls[impl.op_name]
            if replace:
                known = tuple(other for other in known if other.impl_id != impl.impl_id)
            if any(other.impl_id == impl.impl_id for other in known):
                raise OperatorError(
                    f"{impl.impl_id!r} is registered for {impl.op_name} already: give each implementation an "
                    f"id of its own, or unregister the first"
                )
            self._impls[impl.op_name] = (*known, impl)
        self._changed()

    def register_functions(self, origin: str, *functions: Callable[..., Any], **requirements: Any) -> None:
        """Add implementations that are named after their operators.

        ``origin`` begins their ids, with their kind: "vendor.acme"; ``requirements`` are fields of OpImpl.
        """
        kind, _, name = origin.partition(".")
        vendor = name if kind == "vendor" else None
        for function in functions:
            op_name = function.__name__
            self.register(
                OpImpl(
                    op_name, f"{origin}.{op_name}", ImplKind(kind), function, vendor=vendor, **requirements
                )
            )

    def unregister(self, op_name: str, impl_id: str) -> None:
        """Unregister an implementation. The reference cannot be."""
        with self.lock:
            known = self.impls(op_name)
            kept = tuple(impl for impl in known if impl.impl_id != impl_id)
            if len(kept) == len(known):
                raise OperatorError(f"{impl_id!r} is not an implementation of {op_name}")
            if not any(impl.kind is ImplKind.REFERENCE for impl in kept):
                raise OperatorError(f"{impl_id!r} is the reference of {op_name}: it stays")
            self._impls[op_name] = kept
        self._changed()

    def __contains__(self, op_name: str) -> bool:
        return op_name in self._specs

    def spec(self, op_name: str) -> OperatorSpec:
        """Return the operator.

        :raises OperatorError: no operator has this name; lists the names.
        """
        try:
            return self._specs[op_name]
        except KeyError:
            raise OperatorError(
                f"no operator is named {op_name!r}; choose from {', '.join(self.op_names())}"
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

    # -- names that people write ---------------------------------------------------------------------------

    def check_policy(self, policy: SelectionPolicy) -> None:
        """:raises ConfigError: as :meth:`check_names`, and for anything but a SelectionPolicy."""
        if not isinstance(policy, SelectionPolicy):
            raise ConfigError(f"policy {policy!r}: give a SelectionPolicy, such as SelectionPolicy.of()")
        for key, value in vars(policy).items():
            self.check_names(key, value, key)

    def check_names(self, key: str, value: Any, where: str) -> None:
        """Check every operator, vendor and implementation in the value of a policy's or a file's key.

        :raises ConfigError: one does not exist; names ``where`` and the choices.
        """
        if key in ("op_whitelist", "op_blacklist"):
            for name in sorted(value or ()):
                check_choice(where, "operator", name, self.op_names())
        elif key in ("deny_vendors", "allow_vendors"):
            for name in sorted(value or ()):
                check_choice(where, "vendor", name, sorted(self.vendors()))
        elif key == "prefer":
            self._check_token(value, where, None)
        elif key == "per_op_order":
            for op_name, tokens in value:
                check_choice(where, "operator", op_name, self.op_names())
                for token in tokens:
                    self._check_token(token, f"{where}: {op_name}", op_name)

    def _check_token(self, token: Token, where: str, op_name: str | None) -> None:
        if token.vendor is not None:
            check_choice(where, "vendor", token.vendor, sorted(self.vendors()))
        if token.impl_id is not None:
            impls = self.all_impls() if op_name is None else self.impls(op_name)
            check_choice(where, "implementation", token.impl_id, sorted(impl.impl_id for impl in impls))
