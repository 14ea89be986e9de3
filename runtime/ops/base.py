"""Operator: a layer whose computation is one functional operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from sgl_aspects.platforms import current_platform

_layers: weakref.WeakSet[Operator] = weakref.WeakSet()


class _Operators(type):
    """Makes an assigned or deleted method ``forward_<key>`` take effect in existing layers."""

    def __setattr__(cls, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name.startswith("forward_"):
            _override_all()

    def __delattr__(cls, name: str) -> None:
        super().__delattr__(name)
        if name.startswith("forward_"):
            _override_all()


class Operator(nn.Module, metaclass=_Operators):
    """``compute`` calls a function of :mod:`~sgl_aspects.runtime.dispatch`, which finds its implementation.

    A platform may override whole layers, as SGLang's platforms do: by a method ``forward_<dispatch key>`` of
    the class or by :meth:`register_oot_forward`. Overrides are not dispatched: policies, shadow calls and
    fallback are for registered implementations only.
    """

    #: Dispatch key → class → what overrides its ``compute``.
    oot_forwards: ClassVar[dict[str, dict[type, Callable[..., Any]]]] = {}

    @classmethod
    def register_oot_forward(cls, op_cls: type, fn: Callable[..., Any], platform_key: str) -> None:
        """Use ``fn(layer, ...)`` for layers of exactly ``op_cls`` under the dispatch key ``platform_key``.

        It takes precedence over a method ``forward_<platform_key>``, from the next call on.
        """
        cls.oot_forwards.setdefault(platform_key, {})[op_cls] = fn
        _override_all()

    def __init__(self) -> None:
        super().__init__()
        self._override()

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        overriding = self.overriding
        return self.compute(*args, **kwargs) if overriding is None else overriding(self, *args, **kwargs)

    @property
    def can_be_overridden(self) -> bool:
        return True

    def _override(self) -> None:
        _layers.add(self)
        key, cls = current_platform.get_dispatch_key_name(), type(self)
        #: The platform's override of ``compute``.
        self.overriding: Callable[..., Any] | None = None
        if self.can_be_overridden:
            registered = self.oot_forwards.get(key, {}).get(cls)
            self.overriding = registered or _overriding_method(cls, f"forward_{key}")

    def prepare_weights(self) -> None:
        """Called once the weights are loaded. Where the platform overrides the layer: ``prepare_<key>``."""
        prepare = getattr(self, f"prepare_{current_platform.get_dispatch_key_name()}", None)
        if prepare is not None and self.overriding is not None:
            prepare()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "overriding"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._override()


def _overriding_method(cls: type[Operator], name: str) -> Callable[..., Any] | None:
    """Return None also if ``cls`` computes something else than its base class that has the method."""
    owner = next(each for each in cls.__mro__ if name in vars(each) or "compute" in vars(each))
    return getattr(cls, name) if name in vars(owner) else None


def _override_all() -> None:
    for layer in list(_layers):
        layer._override()


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Make an uninitialized parameter for a checkpoint's numbers, which are not trained here."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
