"""Token ids to vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from sgl_aspects.runtime.ops.base import Operator


class Embedding(Operator):
    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype), requires_grad=False)

    def forward_native(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] → [tokens, hidden_size]."""
        return F.embedding(token_ids, self.weight)
