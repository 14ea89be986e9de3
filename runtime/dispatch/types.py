"""Operators, their implementations, and the tokens that name implementations."""

from __future__ import annotations

import enum
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch

from sgl_aspects.errors import ConfigError, OperatorError, OperatorSignatureError
from sgl_aspects.packages import install_command
from sgl_aspects.platforms import current_platform


class ImplKind(enum.Enum):
    """The origin of an implementation. The value is its token; the priority orders kinds."""

    DEFAULT = "default"
    VENDOR = "vendor"
    REFERENCE = "reference"

    @property
    def priority(self) -> int:
        return {"default": 150, "vendor": 100, "reference": 50}[self.value]


#: The tokens of kinds; "flagos" is the name that FlagGems' users know.
KIND_TOKENS: dict[str, ImplKind] = {
    "default": ImplKind.DEFAULT,
    "flagos": ImplKind.DEFAULT,
    "vendor": ImplKind.VENDOR,
    "reference": ImplKind.REFERENCE,
}


def needs(package: str, distribution: str = "") -> Callable[[], bool | str]:
    """Return an ``is_available`` that imports the package if it is installed.

    :param distribution: what to install for it; empty if that depends on the machine.
    """

    def available() -> bool | str:
        if importlib.util.find_spec(package) is None:
            advice = f" ({install_command(distribution)})" if distribution else ""
            return f"the package {package} is not installed{advice}"
        importlib.import_module(package)
        return True

    return available


def on_platform(key: str) -> Callable[[], bool | str]:
    """Return an ``is_available`` that checks the current platform's dispatch key."""

    def available() -> bool | str:
        here = current_platform.get_dispatch_key_name()
        return here == key or f"the platform's dispatch key is {here!r}, not {key!r}"

    return available


@dataclass(frozen=True)
class OpImpl:
    """One implementation of one operator.

    ``fn`` takes the operator's arguments, as its reference does (operators/). It may be the function's name,
    "pkg.mod:function", which is imported when it is first chosen. A requirement that is None does not apply.
    """

    op_name: str
    #: Unique among all implementations of the operator: "vendor.acme.rms_norm".
    impl_id: str
    kind: ImplKind
    fn: Callable[..., Any] | str
    #: Who wrote it; needed for, and only for, the kind VENDOR.
    vendor: str | None = None
    #: Higher comes first within its kind; by default the kind's.
    priority: int | None = None
    supported_dtypes: frozenset[torch.dtype] | None = None
    #: The least compute capability, (major, minor).
    min_arch: tuple[int, int] | None = None
    #: Types of torch devices that it runs on, ("cuda",).
    device_types: frozenset[str] | None = None
    #: Whether it can run in this process, called once: True, or False or a reason why not.
    is_available: Callable[[], bool | str] = lambda: True
    #: Arguments that it writes to, beyond those in the operator's declaration.
    mutates: tuple[str, ...] = ()
    #: Packs a loaded weight for :attr:`fn`'s argument ``packed``; None: not this weight.
    prepare: Callable[[torch.Tensor], torch.Tensor | None] | None = None

    def __post_init__(self) -> None:
        """Check the fields.

        :raises OperatorError: a field has a wrong value.
        """
        for name, collection in (
            ("supported_dtypes", frozenset),
            ("device_types", frozenset),
            ("mutates", tuple),
        ):
            value = getattr(self, name)
            if value is not None:
                one = isinstance(value, (str, torch.dtype))
                object.__setattr__(self, name, collection((value,) if one else value))
        if self.priority is None and isinstance(self.kind, ImplKind):
            object.__setattr__(self, "priority", self.kind.priority)
        has_vendor = bool(self.vendor) if self.kind is ImplKind.VENDOR else self.vendor is None
        of_vendors = ": an implementation of kind vendor names its vendor, and no other does"
        kinds = ", ".join(f"ImplKind.{kind.name}" for kind in ImplKind)
        types = all(isinstance(dtype, torch.dtype) for dtype in self.supported_dtypes or ())
        for name, is_right, advice in (
            ("op_name", isinstance(self.op_name, str) and self.op_name, ": write a name"),
            ("impl_id", isinstance(self.impl_id, str) and self.impl_id, ": write a name"),
            ("kind", isinstance(self.kind, ImplKind), f": choose one of {kinds}"),
            ("fn", callable(self.fn) or _is_name(self.fn), ": write a function, or 'pkg.mod:function'"),
            ("vendor", has_vendor, of_vendors),
            ("priority", isinstance(self.priority, int), ": write a whole number"),
            ("supported_dtypes", types, ": write types such as torch.bfloat16"),
            ("min_arch", self.min_arch is None or _is_version(self.min_arch), ": write (major, minor)"),
            ("is_available", callable(self.is_available), ": write a function that returns True or why not"),
        ):
            if not is_right:
                raise OperatorError(f"OpImpl {self.impl_id!r}: {name}={getattr(self, name)!r}{advice}")

    @cached_property
    def function(self) -> Callable[..., Any]:
        """``fn``, imported where it is a name."""
        return self.fn if callable(self.fn) else cast(Callable[..., Any], pkgutil.resolve_name(self.fn))

    @property
    def depends_on_tensors(self) -> bool:
        """True if it supports some tensors and not others."""
        return not (self.supported_dtypes is None and self.min_arch is None and self.device_types is None)


def _is_name(value: Any) -> bool:
    module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    return bool(module and colon and name)


def _is_version(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, int) for part in value)


@dataclass(frozen=True)
class OperatorSpec:
    """An operator: its reference defines the computation and the names of its arguments."""

    name: str
    reference: Callable[..., Any]
    #: Arguments that every implementation writes to.
    mutates: tuple[str, ...] = ()
    #: The argument whose dtype and device decide which implementation serves a call; else the first.
    keyed_by: str = ""

    def __post_init__(self) -> None:
        if not self.keyed_by:
            object.__setattr__(self, "keyed_by", next(iter(self.parameters)))
        self._check_arguments(self.mutates, f"operator {self.name}: mutates")
        self._check_arguments((self.keyed_by,), f"operator {self.name}: keyed_by")

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.reference).parameters

    @cached_property
    def key_index(self) -> int:
        return list(self.parameters).index(self.keyed_by)

    def callable_of(self, impl: OpImpl) -> Callable[..., Any]:
        """The implementation's function if it has the operator's defaults, else a wrapper that has them.

        :raises OperatorSignatureError: it was registered by name, and takes other arguments.
        """
        function = impl.function
        if isinstance(impl.fn, str):
            self._check_parameters(impl, function)
        found = _parameters_of(function)
        if found is None or all(
            name in found and found[name].default == each.default for name, each in self.parameters.items()
        ):
            return function
        defaults = {name: each.default for name, each in self.parameters.items()}

        def with_defaults(*args: Any, **kwargs: Any) -> Any:
            return function(*{**defaults, **dict(zip(defaults, args)), **kwargs}.values())

        return with_defaults

    def check_signature(self, impl: OpImpl) -> None:
        """Check that the function has the reference's parameters, names and order; more only with defaults.
        An implementation that is registered by name is checked when it is first chosen.

        :raises OperatorSignatureError: names the difference.
        """
        self._check_arguments(impl.mutates, f"{impl.impl_id}: mutates")
        if callable(impl.fn):
            self._check_parameters(impl, impl.fn)

    def _check_parameters(self, impl: OpImpl, function: Callable[..., Any]) -> None:
        found = _parameters_of(function)
        if found is None or any(each.kind is each.VAR_POSITIONAL for each in found.values()):
            return
        count = len(self.parameters)
        given, extra = list(found.values())[:count], list(found.values())[count:]
        if (
            [each.name for each in given] != list(self.parameters)
            or any(each.kind is each.KEYWORD_ONLY for each in given)
            or any(each.default is each.empty and each.kind is not each.VAR_KEYWORD for each in extra)
        ):
            # A partial, or an object that can be called, has no name of its own.
            name = getattr(function, "__qualname__", None)
            raise OperatorSignatureError(
                f"{impl.impl_id} is {f'{function.__module__}.{name}' if name else repr(function)}"
                f"{inspect.signature(function)}, and operator {self.name} is called with "
                f"{inspect.signature(self.reference)}: take these arguments in this order, and others only "
                f"with a default"
            )

    def _check_arguments(self, names: tuple[str, ...], field: str) -> None:
        for name in names:
            if name not in self.parameters:
                arguments = ", ".join(self.parameters)
                raise OperatorError(f"{field}={name!r}; {self.name} has the arguments {arguments}")


def _parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters; None for a builtin without a signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True)
class Token:
    """One entry of an order: a kind, one vendor, or one implementation."""

    text: str
    kind: ImplKind | None = None
    vendor: str | None = None
    impl_id: str | None = None

    @classmethod
    def parse(cls, text: object, where: str) -> Token:
        """Parse ``default``, ``flagos``, ``vendor``, ``reference``, ``vendor:<name>`` or ``impl:<id>``.

        :raises ConfigError: anything else; ``where`` names the key of the file or the variable.
        """
        if isinstance(text, str):
            head, colon, name = (part.strip() for part in text.partition(":"))
            if not colon and head.lower() in KIND_TOKENS:
                kind = KIND_TOKENS[head.lower()]
                return cls(kind.value, kind=kind)
            if name and head == "vendor":
                return cls(f"vendor:{name}", vendor=name)
            if name and head == "impl":
                return cls(f"impl:{name}", impl_id=name)
        raise ConfigError(
            f"{where}: unknown token {text!r}; choose from {', '.join(KIND_TOKENS)}, vendor:<name>, impl:<id>"
        )

    def matches(self, impl: OpImpl) -> bool:
        if self.impl_id is not None:
            return impl.impl_id == self.impl_id
        if self.vendor is not None:
            return impl.vendor == self.vendor
        return impl.kind is self.kind


def check_choice(where: str, what: str, name: str, choices: list[str]) -> None:
    """Check a name.

    :raises ConfigError: ``name`` is not one of the choices.
    """
    if name not in choices:
        raise ConfigError(f"{where}: unknown {what} {name!r}; choose from {', '.join(choices) or 'none'}")
