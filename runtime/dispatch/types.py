"""What an implementation of an operator is, and the tokens that name implementations in an order."""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sgl_aspects.errors import ConfigError, OperatorError


class ImplKind(enum.Enum):
    """Where an implementation comes from. The value is its token; the priority orders kinds."""

    DEFAULT = "default"
    VENDOR = "vendor"
    REFERENCE = "reference"

    @property
    def priority(self) -> int:
        return {"default": 150, "vendor": 100, "reference": 50}[self.value]


#: What people write for a kind; "flagos" is the name that FlagGems' users know.
KIND_TOKENS: dict[str, ImplKind] = {
    "default": ImplKind.DEFAULT,
    "flagos": ImplKind.DEFAULT,
    "vendor": ImplKind.VENDOR,
    "reference": ImplKind.REFERENCE,
}


def _always() -> bool:
    return True


def needs(package: str, advice: str = "") -> Callable[[], bool | str]:
    """For ``is_available``: whether the package is installed; where it is, it must load."""

    def available() -> bool | str:
        if importlib.util.find_spec(package) is None:
            return f"the package {package} is not installed{advice}"
        importlib.import_module(package)
        return True

    return available


def _is_version(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, int) for part in value)


@dataclass(frozen=True)
class OpImpl:
    """One implementation of one operator.

    ``fn`` takes the operator's arguments, as its reference does (operators.py); with ``takes_layer`` a layer
    of the runtime and what the layer was called with. None of a requirement means that there is none.
    """

    op_name: str
    #: Unique among all implementations of the operator: "vendor.acme.rms_norm".
    impl_id: str
    kind: ImplKind
    fn: Callable[..., Any]
    #: Who wrote it; needed for, and only for, the kind VENDOR.
    vendor: str | None = None
    #: Higher comes first within its kind; by default what the kind says.
    priority: int | None = None
    supported_dtypes: frozenset[torch.dtype] | None = None
    #: The least compute capability, (major, minor).
    min_arch: tuple[int, int] | None = None
    #: Types of torch devices that it runs on, ("cuda",).
    device_types: frozenset[str] | None = None
    #: Whether it can run in this process, asked once: True, or False or a reason why not.
    is_available: Callable[[], bool | str] = _always
    #: Arguments that it writes to, beyond those that the operator itself says it does.
    mutates: tuple[str, ...] = ()
    takes_layer: bool = False

    def __post_init__(self) -> None:
        """:raises OperatorError: a field does not hold what it should."""
        for name in ("supported_dtypes", "device_types", "mutates"):
            value = getattr(self, name)
            if value is not None:
                one = isinstance(value, (str, torch.dtype))
                kind = tuple if name == "mutates" else frozenset
                object.__setattr__(self, name, kind((value,) if one else value))
        if self.priority is None and isinstance(self.kind, ImplKind):
            object.__setattr__(self, "priority", self.kind.priority)
        kinds = ", ".join(f"ImplKind.{kind.name}" for kind in ImplKind)
        for name, is_right, advice in (
            ("op_name", isinstance(self.op_name, str) and self.op_name, ": write a name"),
            ("impl_id", isinstance(self.impl_id, str) and self.impl_id, ": write a name"),
            ("kind", isinstance(self.kind, ImplKind), f": choose one of {kinds}"),
            ("fn", callable(self.fn), " cannot be called"),
            (
                "vendor",
                bool(self.vendor) if self.kind is ImplKind.VENDOR else self.vendor is None,
                ": an implementation of kind vendor names its vendor, and no other does",
            ),
            ("priority", isinstance(self.priority, int), ": write a whole number"),
            (
                "supported_dtypes",
                all(isinstance(dtype, torch.dtype) for dtype in self.supported_dtypes or ()),
                ": write types such as torch.bfloat16",
            ),
            ("min_arch", self.min_arch is None or _is_version(self.min_arch), ": write (major, minor)"),
            ("is_available", callable(self.is_available), ": write a function that says True or why not"),
        ):
            if not is_right:
                raise OperatorError(f"OpImpl {self.impl_id!r}: {name}={getattr(self, name)!r}{advice}")

    @property
    def depends_on_tensors(self) -> bool:
        """True where it serves some tensors and not others."""
        return not (self.supported_dtypes is None and self.min_arch is None and self.device_types is None)


@dataclass(frozen=True)
class Token:
    """One entry of an order: a kind, one vendor, or one implementation."""

    text: str
    kind: ImplKind | None = None
    vendor: str | None = None
    impl_id: str | None = None

    @classmethod
    def parse(cls, text: object, where: str) -> Token:
        """``default``, ``flagos``, ``vendor``, ``reference``, ``vendor:<name>`` or ``impl:<id>``.

        :raises ConfigError: anything else; ``where`` says which key of which file or which variable.
        """
        if isinstance(text, str):
            stripped = text.strip()
            head, colon, rest = stripped.partition(":")
            if not colon and stripped.lower() in KIND_TOKENS:
                kind = KIND_TOKENS[stripped.lower()]
                return cls(kind.value, kind=kind)
            if colon and rest.strip() and head.strip() == "vendor":
                return cls(f"vendor:{rest.strip()}", vendor=rest.strip())
            if colon and rest.strip() and head.strip() == "impl":
                return cls(f"impl:{rest.strip()}", impl_id=rest.strip())
        raise ConfigError(
            f"{where}: unknown token {text!r}; choose from {', '.join(KIND_TOKENS)}, vendor:<name>, impl:<id>"
        )

    def matches(self, impl: OpImpl) -> bool:
        if self.impl_id is not None:
            return impl.impl_id == self.impl_id
        if self.vendor is not None:
            return impl.vendor == self.vendor
        return impl.kind is self.kind
