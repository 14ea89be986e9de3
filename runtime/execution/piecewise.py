"""Compiled layers: each one's work before and after attention becomes one compiled piece.

Attention stays as it is: its backend has kernels of its own, and reads sizes that differ from step to step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sgl_aspects.runtime.models.decoder import DecoderLayer

if TYPE_CHECKING:
    from sgl_aspects.runtime.execution.model_runner import ModelRunner


class PiecewiseBackend:
    """The backend of platforms that name no class of their own (``get_piecewise_backend_cls``).

    Nothing is captured: a platform whose pieces are replayed as graphs declares ``piecewise_graph``.
    """

    def __init__(self, model_runner: ModelRunner) -> None:
        self._runner = model_runner

    def compile(self) -> None:
        """Compile each piece at its first call, by the platform's backend, for any number of tokens."""
        attention: Any = self._runner.attention_backend
        attention.forward = torch.compiler.disable(attention.forward)  # type: ignore[no-untyped-call]
        backend = self._runner.platform.get_compile_backend(self._runner.server_args.compile_mode)
        for module in self._runner.model.modules():
            if isinstance(module, DecoderLayer):
                module.compile(backend=backend, dynamic=True)
