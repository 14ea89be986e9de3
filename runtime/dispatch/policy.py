"""SelectionPolicy: which implementations a person wants, and the scopes that change it for a while."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

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
        per_op_order: Mapping[str, Iterable[str]] | None = None,
        strict: bool = False,
        deny_vendors: Iterable[str] = (),
        allow_vendors: Iterable[str] | None = None,
        op_whitelist: Iterable[str] | None = None,
        op_blacklist: Iterable[str] = (),
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

    def order_of(self, op_name: str) -> tuple[Token, ...]:
        """The tokens for this operator, best first."""
        for name, tokens in self.per_op_order:
            if name == op_name:
                return tokens
        return (self.prefer,)

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
        arranged: list[OpImpl] = []
        for token in self.order_of(op_name):
            arranged += [impl for impl in by_priority if token.matches(impl) and impl not in arranged]
        if self.strict and (arranged or op_name in dict(self.per_op_order)):
            return arranged
        return arranged + [impl for impl in by_priority if impl not in arranged]

    def describe(self) -> str:
        """In one line, what differs from the default."""
        said = [f"prefer={self.prefer.text}"]
        said += [f"{op}={'|'.join(token.text for token in tokens)}" for op, tokens in self.per_op_order]
        said += ["strict"] if self.strict else []
        for name in ("deny_vendors", "allow_vendors", "op_whitelist", "op_blacklist"):
            value = getattr(self, name)
            if value:
                said.append(f"{name}={','.join(sorted(value))}")
        return " ".join(said)

    def with_preference(self, token: str) -> SelectionPolicy:
        return replace(self, prefer=Token.parse(token, "with_preference"))

    def with_order(self, op_name: str, tokens: str | Iterable[str]) -> SelectionPolicy:
        parsed = tuple(Token.parse(token, f"order of {op_name}") for token in listed(tokens, "|"))
        return replace(self, per_op_order=tuple(sorted({**dict(self.per_op_order), op_name: parsed}.items())))


@dataclass(frozen=True)
class ConfiguredPolicy:
    """A policy and, for each of its fields, who said so."""

    policy: SelectionPolicy
    origins: Mapping[str, str] = field(default_factory=dict)

    def origin(self, name: str) -> str:
        return self.origins.get(name, "default")
