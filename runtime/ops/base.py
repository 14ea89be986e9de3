"""Operator: one computation with a compulsory reference and optional faster forms per platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sgl_aspects.platforms import current_platform


class Operator(nn.Module):
    """Runs ``forward_<key>``, where the platform names the key; ``forward_native`` where there is none.

    The choice is made once, when the operator is made. ``forward_native`` is plain PyTorch, works on every
    device, and is what the other forms are compared with.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "forward_native"):
            raise TypeError(f"{cls.__qualname__} is an operator without forward_native: write the reference")

    def __init__(self) -> None:
        super().__init__()
        self.dispatch_key = current_platform.get_dispatch_key_name()
        native: Callable[..., Any] = self.forward_native  # type: ignore[assignment]  # of the subclass
        self._forward_method: Callable[..., Any] = getattr(self, f"forward_{self.dispatch_key}", native)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward_method(*args, **kwargs)

    def prepare_weights(self) -> None:
        """Runs ``prepare_<key>`` if there is one: called once, when the weights are loaded and final."""
        prepare = getattr(self, f"prepare_{self.dispatch_key}", None)
        if prepare is not None:
            prepare()
