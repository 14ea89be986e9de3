"""Token ids to vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sgl_aspects.runtime.dispatch.reference import dense
from sgl_aspects.runtime.ops.base import Operator, parameter


class Embedding(Operator):
    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size, dtype=dtype)

    def forward_native(self, token_ids: Tensor) -> Tensor:
        """[tokens] → [tokens, hidden_size]."""
        return dense.embedding(token_ids, self.weight)

    def forward_cuda(self, token_ids: Tensor) -> Tensor:
        """The library's embedding fetches few rows one after the other."""
        return self.weight[token_ids]

    def call_function(self, function: Any, token_ids: Tensor) -> Any:
        return function(token_ids, self.weight)

    def key_tensor(self, args: tuple[Any, ...]) -> Any:
        return self.weight
