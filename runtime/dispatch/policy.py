"""SelectionPolicy: the user's choice of implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sgl_aspects.errors import ConfigError
from sgl_aspects.runtime.dispatch.types import ImplKind, OpImpl, Token, check_choice


@dataclass(frozen=True)
class Value:
    """A source's value of a key, and where it is written."""

    value: Any
    where: str


DEFAULT_PREFERENCE = Token("default", kind=ImplKind.DEFAULT)


def listed(names: str | Iterable[str], separator: str = ",") -> list[str]:
    """A list of names, or ``"name,name"``."""
    if not isinstance(names, str):
        return list(names)
    return [name for name in (part.strip() for part in names.split(separator)) if name]


@dataclass(frozen=True)
class SelectionPolicy:
    """Hashable, so that it can be part of a key.

    Without ``strict`` an order is a preference: implementations outside it follow, the reference last. With
    ``strict`` one from the order must run, and must not fail; only if no implementation of an operator is in
    ``prefer``, the others are used.
    """

    #: Preferred where ``per_op_order`` has no entry.
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
    def of(cls, **said: Any) -> SelectionPolicy:
        """Make a policy from values of a file or a variable: ``of(prefer="vendor", deny_vendors=["acme"])``.

        :raises ConfigError: an unknown key, a value that its key cannot have, both lists of operators.
        """
        for key in said:
            check_choice("SelectionPolicy", "key", key, list(READERS))
        given = {key: value for key, value in said.items() if value is not None}
        return cls(**{key: READERS[key](Value(value, key)) for key, value in given.items()})

    def is_dispatched(self, op_name: str) -> bool:
        if self.op_whitelist is not None:
            return op_name in self.op_whitelist
        return op_name not in self.op_blacklist

    def refuses(self, impl: OpImpl) -> str | None:
        """Return why this implementation is not allowed, whatever the order; None: it is."""
        if impl.vendor is None:
            return None
        if impl.vendor in self.deny_vendors:
            return f"vendor {impl.vendor} is denied"
        if self.allow_vendors is not None and impl.vendor not in self.allow_vendors:
            return f"vendor {impl.vendor} is not among those allowed"
        return None

    def arranged(self, op_name: str, impls: Iterable[OpImpl]) -> list[OpImpl]:
        """Return the implementations that this policy allows, best first."""
        by_priority = sorted(impls, key=lambda impl: (-(impl.priority or 0), impl.impl_id))
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
        """Format the value of a key like a variable."""
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
        """Describe in one line how it differs from the default."""
        said = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        return " ".join(f"{key}={self.written(key)}" for key in dict.fromkeys(["prefer", *said]))


# -- readers of one value each ---------------------------------------------------------------------------


def read_names(value: Value) -> frozenset[str]:
    names = listed(value.value) if isinstance(value.value, (str, list, tuple, set, frozenset)) else [""]
    is_blank = isinstance(value.value, str) and not names
    if is_blank or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{value.where}: {value.value!r}: write a list of names")
    return frozenset(names)


def _flag(value: Value) -> bool:
    lowered = str(value.value).strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"{value.where}: {value.value!r}: choose true or false")


def _orders(value: Value) -> tuple[tuple[str, tuple[Token, ...]], ...]:
    orders: dict[str, tuple[Token, ...]] = {}
    for op_name, tokens in _pairs(value).items():
        where = f"{value.where}: {op_name}"
        named = listed(tokens, "|") if isinstance(tokens, (str, list, tuple)) else []
        if not named:
            raise ConfigError(f"{where}: {tokens!r}: write one token or a list of tokens, best first")
        orders[op_name] = tuple(Token.parse(each, where) for each in named)
    return tuple(sorted(orders.items()))


def _pairs(value: Value) -> dict[str, Any]:
    """A mapping, or ``"op=a|b;op2=c"``."""
    given = value.value
    if isinstance(given, str):
        pairs: dict[str, Any] = {}
        for part in listed(given.replace(",", ";"), ";"):
            op_name, equals, tokens = part.partition("=")
            if not equals:
                raise ConfigError(f"{value.where}: {part!r}: write operator=token|token;operator=token")
            if op_name.strip() in pairs:
                raise ConfigError(f"{value.where}: {op_name.strip()!r} is there twice: write operator=a|b")
            pairs[op_name.strip()] = tokens.strip()
        return pairs
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(f"{value.where}: {given!r}: write one line 'operator: tokens' each")
    return dict(given)


#: The reader of each key of a policy. The registry checks the names in it.
READERS: dict[str, Callable[[Value], Any]] = {
    "prefer": lambda value: Token.parse(value.value, value.where),
    "per_op_order": _orders,
    "strict": _flag,
    "deny_vendors": read_names,
    "allow_vendors": read_names,
    "op_whitelist": read_names,
    "op_blacklist": read_names,
}
