"""Token ids to vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.ops.base import Operator, parameter


class Embedding(Operator):
    op_name = "embedding"

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size, dtype=dtype)

    def compute(self, token_ids: Tensor) -> Tensor:
        """[tokens] → [tokens, hidden_size]."""
        return dispatch.embedding(token_ids, self.weight)
