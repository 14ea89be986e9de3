"""Operator: a layer whose computation is one functional operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sgl_aspects.errors import OperatorError, PlatformError
from sgl_aspects.platforms import current_platform
from sgl_aspects.runtime import dispatch


class Operator(nn.Module):
    """``compute`` calls a function of :mod:`sgl_aspects.runtime.dispatch`, which finds its implementation."""

    #: The name of that function.
    op_name: str = ""
    compute: Callable[..., Any]

    @staticmethod
    def register_oot_forward(op_cls: type[Operator] | str, fn: Callable[..., Any], platform_key: str) -> None:
        """Register ``fn`` for platforms of a dispatch key: a vendor's implementation of a layer's operator.

        SGLang's name for it. ``op_cls`` is the layer's class, or the operator's name; ``fn`` takes the
        operator's arguments. One that is registered again replaces the first.

        :raises OperatorSignatureError: ``fn`` takes other arguments.
        """
        op_name = op_cls if isinstance(op_cls, str) else getattr(op_cls, "op_name", "")
        registry = dispatch.get_manager().registry
        if op_name not in registry:
            raise OperatorError(
                f"register_oot_forward({op_cls!r}): not a layer with an operator; choose one, or a name from "
                f"{', '.join(registry.op_names())}"
            )
        impl_id = f"oot.{platform_key}.{op_name}"
        registry.register(
            dispatch.OpImpl(
                op_name,
                impl_id,
                dispatch.ImplKind.VENDOR,
                fn,
                vendor=platform_key,
                priority=dispatch.ImplKind.VENDOR.priority + 1,  # before kernels that come with the engine
                is_available=dispatch.on_platform(platform_key),
            ),
            replace=True,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **kwargs)

    def prepare_weights(self) -> None:
        """Called once the weights are loaded."""
        method = f"forward_{current_platform.get_dispatch_key_name()}"
        if hasattr(self, method):
            name = type(self).__name__
            raise PlatformError(
                f"{name}.{method} is never called: a layer runs the implementation of its operator. Register "
                f"one: Operator.register_oot_forward({name}, function of {self.op_name}'s arguments, key)"
            )


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Make an uninitialized parameter for a checkpoint's numbers, which are not trained here."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
