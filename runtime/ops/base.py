"""Operator: a layer of a model whose computation is dispatched."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from sgl_aspects.platforms import current_platform
from sgl_aspects.runtime.dispatch import get_manager
from sgl_aspects.runtime.dispatch.process import process_manager
from sgl_aspects.runtime.dispatch.types import ImplKind, OpImpl


class _Operators(type):
    """A form that is written into a class later serves from the next call on."""

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.startswith("forward_"):
            _choose_anew()

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        if name.startswith("forward_"):
            _choose_anew()


class Operator(nn.Module, metaclass=_Operators):
    """Runs what the policy chooses for ``op_name``: a form of its class, or an operator's function.

    ``forward_native`` is plain PyTorch, works on every device, and is what the others are compared with.
    ``forward_<key>`` is the form for platforms of that dispatch key, a vendor's implementation by that name;
    :meth:`register_oot_forward` gives one from outside, under the name that SGLang's operators have for it.
    Functions of :mod:`~sgl_aspects.runtime.dispatch` come in through :meth:`call_function`.
    """

    #: The operator's name; the class's own in small letters where a subclass says none.
    op_name: ClassVar[str] = ""
    #: True where ``call_function`` is written.
    takes_functions: bool = False
    #: Dispatch key → class → the form that was registered from outside.
    oot_forwards: ClassVar[dict[str, dict[type, Callable[..., Any]]]] = {}

    @classmethod
    def register_oot_forward(cls, op_cls: type, fn: Callable[..., Any], platform_key: str) -> None:
        """Let ``fn(layer, ...)`` serve layers of exactly ``op_cls`` under the dispatch key ``platform_key``.

        It comes before a method ``forward_<platform_key>``, and serves from the next call on.
        """
        cls.oot_forwards.setdefault(platform_key, {})[op_cls] = fn
        _choose_anew()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "forward_native"):
            raise TypeError(f"{cls.__qualname__} is an operator without forward_native: write the reference")
        if not cls.op_name:
            cls.op_name = re.sub(r"(?<!^)(?<![A-Z_])(?=[A-Z])", "_", cls.__name__).lower()
        cls.takes_functions = "call_function" in cls.__dict__ or cls.takes_functions

    def __init__(self) -> None:
        super().__init__()
        self._site = get_manager().site(self.op_name, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        site = self._site
        try:
            return site.run(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # raised again, or served by the next implementation
            return site.recover(error, args, kwargs)

    def call_function(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an implementation of the operator with what :meth:`forward` was called with."""
        raise NotImplementedError

    def key_tensor(self, args: tuple[Any, ...]) -> Any:
        """The tensor whose dtype and device decide who serves."""
        return args[0]

    @classmethod
    def forms(cls) -> tuple[OpImpl, ...]:
        """The class's own implementations: its methods ``forward_native`` and ``forward_<key>``."""
        here = current_platform.get_dispatch_key_name()
        registered = cls.oot_forwards.get(here, {}).get(cls)
        own = {name for name in dir(cls) if name.startswith("forward_")}
        found = []
        for name in sorted(own | ({f"forward_{here}"} if registered else set())):
            key = name.removeprefix("forward_")
            native = key == "native"
            against = f"the platform's dispatch key is {here!r}"
            found.append(
                OpImpl(
                    cls.op_name,
                    f"{cls.__name__}.{name}",
                    ImplKind.REFERENCE if native else ImplKind.VENDOR,
                    registered if registered and key == here else getattr(cls, name),
                    vendor=None if native else key,
                    is_available=_answer(True if native or key == here else against),
                    takes_layer=True,
                )
            )
        return tuple(found)

    def chosen(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> OpImpl:
        """The implementation that serves tensors of this type and device now."""
        return self._site.select((dtype, device)).impl

    def prepare_weights(self) -> None:
        """Called once the weights are loaded: runs ``prepare_<key>`` where ``forward_<key>`` serves."""
        first = next(self.parameters(), None)
        impl = self.chosen(None if first is None else first.dtype, None if first is None else first.device)
        prepare = getattr(self, f"prepare_{impl.vendor}", None) if impl.takes_layer and impl.vendor else None
        if prepare is not None:
            prepare()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_site"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._site = get_manager().site(self.op_name, self)


def _choose_anew() -> None:
    manager = process_manager()
    if manager is not None:
        manager.choose_anew()


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Room for a checkpoint's numbers, which nobody trains here."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class _answer:  # noqa: N801  # a function that compares equal to another with the same answer
    def __init__(self, value: bool | str) -> None:
        self.value = value

    def __call__(self) -> bool | str:
        return self.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _answer) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)
