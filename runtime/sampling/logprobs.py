"""Log probabilities of the tokens that were chosen, and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_aspects.runtime.messages import TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], wanted: Sequence[int | None]
) -> list[TokenLogprobs | None]:
    """Return an entry for each row of ``logits`` [rows, vocab]: None where ``wanted`` is None."""
    results: list[TokenLogprobs | None] = [None] * len(wanted)
    rows = [i for i, count in enumerate(wanted) if count is not None]
    if not rows:
        return results
    logprobs = logits[torch.tensor(rows, device=logits.device)].float().log_softmax(dim=-1)
    chosen = torch.tensor([[token_ids[i]] for i in rows], device=logits.device)
    of_chosen = logprobs.gather(1, chosen).squeeze(1).tolist()
    most = min(max(wanted[i] or 0 for i in rows), logits.shape[-1])
    best, indices = logprobs.topk(most, dim=-1)
    for row, logprob, values, tokens in zip(rows, of_chosen, best.tolist(), indices.tolist()):
        top = tuple(zip(tokens, values))[: wanted[row]]
        results[row] = TokenLogprobs(token_ids[row], logprob, top)
    return results
