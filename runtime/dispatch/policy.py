"""SelectionPolicy: which implementations a person wants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from sgl_aspects.errors import ConfigError
from sgl_aspects.runtime.dispatch.types import ImplKind, OpImpl, Token

DEFAULT_PREFERENCE = Token("default", kind=ImplKind.DEFAULT)


def listed(names: str | Iterable[str], separator: str = ",") -> list[str]:
    """A list of names, or ``"name,name"``."""
    if not isinstance(names, str):
        return list(names)
    return [name for name in (part.strip() for part in names.split(separator)) if name]


@dataclass(frozen=True)
class SelectionPolicy:
    """Hashable, so that it can be part of a key.

    Without ``strict`` an order is a wish: what it does not name follows, the reference last. With ``strict``
    what the order names must serve, and what was chosen must not fail; only where ``prefer`` names nothing
    that an operator has, the others serve it.
    """

    #: What comes first where ``per_op_order`` says nothing.
    prefer: Token = DEFAULT_PREFERENCE
    #: (operator, tokens) pairs; give a mapping.
    per_op_order: tuple[tuple[str, tuple[Token, ...]], ...] = ()
    strict: bool = False
    deny_vendors: frozenset[str] = frozenset()
    #: None: every vendor.
    allow_vendors: frozenset[str] | None = None
    #: Only these operators are dispatched, the others run their reference; None: all of them.
    op_whitelist: frozenset[str] | None = None
    #: These run their reference.
    op_blacklist: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.op_whitelist is not None and self.op_blacklist:
            raise ConfigError(
                f"op_whitelist ({', '.join(sorted(self.op_whitelist))}) and op_blacklist "
                f"({', '.join(sorted(self.op_blacklist))}) are both given: keep one of them"
            )

    @classmethod
    def of(
        cls,
        *,
        prefer: str = "default",
        per_op_order: Mapping[str, str | Iterable[str]] | None = None,
        strict: bool = False,
        deny_vendors: str | Iterable[str] = (),
        allow_vendors: str | Iterable[str] | None = None,
        op_whitelist: str | Iterable[str] | None = None,
        op_blacklist: str | Iterable[str] = (),
    ) -> SelectionPolicy:
        """From plain values, lists also as a file has them: ``"a|b"`` and ``"a,b"``.

        :raises ConfigError: as :meth:`Token.parse` does; both lists of operators.
        """
        orders = {
            op: tuple(Token.parse(token, f"per_op_order of {op}") for token in listed(tokens, "|"))
            for op, tokens in (per_op_order or {}).items()
        }
        return cls(
            prefer=Token.parse(prefer, "prefer"),
            per_op_order=tuple(sorted(orders.items())),
            strict=strict,
            deny_vendors=frozenset(listed(deny_vendors)),
            allow_vendors=None if allow_vendors is None else frozenset(listed(allow_vendors)),
            op_whitelist=None if op_whitelist is None else frozenset(listed(op_whitelist)),
            op_blacklist=frozenset(listed(op_blacklist)),
        )

    def is_dispatched(self, op_name: str) -> bool:
        if self.op_whitelist is not None:
            return op_name in self.op_whitelist
        return op_name not in self.op_blacklist

    def refuses(self, impl: OpImpl) -> str | None:
        """Why this implementation may not be used whatever the order says; None: it may."""
        if impl.vendor is None:
            return None
        if impl.vendor in self.deny_vendors:
            return f"vendor {impl.vendor} is denied"
        if self.allow_vendors is not None and impl.vendor not in self.allow_vendors:
            return f"vendor {impl.vendor} is not among those allowed"
        return None

    def arranged(self, op_name: str, impls: Iterable[OpImpl]) -> list[OpImpl]:
        """The implementations that this policy would use, best first."""
        by_priority = sorted(
            impls, key=lambda impl: (-(impl.priority or 0), not impl.takes_layer, impl.impl_id)
        )
        if not self.is_dispatched(op_name):
            return [impl for impl in by_priority if impl.kind is ImplKind.REFERENCE]
        orders = dict(self.per_op_order)
        arranged: list[OpImpl] = []
        for token in orders.get(op_name, (self.prefer,)):
            arranged += [impl for impl in by_priority if token.matches(impl) and impl not in arranged]
        if self.strict and (arranged or op_name in orders):
            return arranged
        return arranged + [impl for impl in by_priority if impl not in arranged]

    def written(self, key: str) -> str:
        """The value of a key as a variable has it."""
        if key == "prefer":
            return self.prefer.text
        if key == "strict":
            return str(self.strict).lower()
        if key == "per_op_order":
            return ";".join(
                f"{op}={'|'.join(each.text for each in order)}" for op, order in self.per_op_order
            )
        return ",".join(sorted(getattr(self, key) or ()))

    def describe(self) -> str:
        """In one line, what differs from the default."""
        said = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        return " ".join(f"{key}={self.written(key)}" for key in dict.fromkeys(["prefer", *said]))
