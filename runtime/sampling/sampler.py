"""From logits to tokens, and their log probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sgl_aspects.runtime.messages import TokenLogprobs
from sgl_aspects.runtime.sampling_params import SamplingParams

#: top_p considers this many of the likeliest tokens first; sorting a whole vocabulary takes far longer.
_CANDIDATES = 256
#: The number of parts of a vocabulary that are searched for the likeliest token in parallel.
_PARTS = 256


class Sampler:
    """Chooses one token a row. Greedy rows take the likeliest; the others use one uniform number each."""

    def __call__(
        self, logits: torch.Tensor, params: list[SamplingParams], uniforms: list[float]
    ) -> torch.Tensor:
        """logits [rows, vocab] → token ids [rows]; ``uniforms`` in [0, 1), not used by greedy rows."""
        tokens = likeliest(logits)
        for is_cut in (False, True):
            rows = [i for i, p in enumerate(params) if not p.is_greedy and _is_cut(p) == is_cut]
            if not rows:
                continue
            of_rows = [params[i] for i in rows]
            index = torch.tensor(rows, device=logits.device)
            draws = torch.tensor([[uniforms[i]] for i in rows], device=logits.device, dtype=torch.float64)
            probabilities = self._probabilities(logits[index], [p.temperature for p in of_rows])
            if is_cut:
                tokens[index] = self._choose_from_likeliest(probabilities, of_rows, draws)
            else:
                tokens[index] = _draw(probabilities, draws)
        return tokens

    def _probabilities(self, logits: torch.Tensor, temperatures: list[float]) -> torch.Tensor:
        divisors = torch.tensor(temperatures, device=logits.device, dtype=torch.float32).unsqueeze(1)
        divisors.clamp_(min=torch.finfo(torch.float32).tiny)  # exact zeros here are not requested ones
        # Subtracting the largest first keeps tiny temperatures from overflowing to infinity.
        shifted = logits.float() - logits.float().amax(dim=-1, keepdim=True)
        return torch.softmax(shifted / divisors, dim=-1)

    def _choose_from_likeliest(
        self, probabilities: torch.Tensor, params: list[SamplingParams], uniforms: torch.Tensor
    ) -> torch.Tensor:
        vocab = probabilities.shape[-1]
        top_k = torch.tensor([min(p.top_k or vocab, vocab) for p in params], device=probabilities.device)
        top_p = torch.tensor([p.top_p for p in params], device=probabilities.device, dtype=torch.float64)
        # Enough candidates for every row: its k where it has one, a guess where only p cuts.
        wanted = max(p.top_k or _CANDIDATES for p in params)
        best, indices = probabilities.topk(min(wanted, vocab), dim=-1)
        min_p = torch.tensor([p.min_p for p in params], device=probabilities.device, dtype=torch.float64)
        least = min_p * best[:, 0].double()
        sure = (best.double().sum(dim=-1) >= top_p) | (best[:, -1] < least)
        if not bool((sure | (top_k <= best.shape[-1])).all()):
            best, indices = probabilities.sort(dim=-1, descending=True)
        best = best.double()
        ranks = torch.arange(best.shape[-1], device=best.device)
        best = best.masked_fill(ranks >= top_k.unsqueeze(1), 0.0)
        # top_p counts over what top_k left; where it left all, the candidates need not be all of it.
        whole = torch.where(top_k < vocab, best.sum(dim=-1), 1.0)
        before = best.cumsum(dim=-1) - best
        # A token stays while those before it do not reach p.
        dropped = (before >= (top_p * whole).unsqueeze(1)) | (best < least.unsqueeze(1))
        dropped[:, 0] = False  # also where the product is too small for a number
        best = best.masked_fill(dropped, 0.0)
        return indices.gather(1, _draw(best, uniforms).unsqueeze(1)).squeeze(1)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """logits [rows, vocab] → the first of the largest of each row, [rows].

    In two rounds where the vocabulary can be cut evenly: a row alone keeps a small part of a device busy.
    """
    rows, vocab = logits.shape
    parts = math.gcd(vocab, _PARTS)
    largest, places = logits.reshape(rows, parts, -1).max(dim=-1)
    part = largest.argmax(dim=-1, keepdim=True)
    return torch.add(places.gather(1, part), part, alpha=vocab // parts).squeeze(1)


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


def _is_cut(params: SamplingParams) -> bool:
    """Return whether some tokens are excluded before one is drawn."""
    return params.top_p < 1.0 or params.top_k is not None or params.min_p > 0.0


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return for each row the first index at which the running sum exceeds ``uniforms`` of the total."""
    sums = weights.double().cumsum(dim=-1)
    whole = sums[:, -1:]
    # Below the total even if the product rounds up to it, which would give an index past the end.
    shares = torch.minimum(uniforms * whole, torch.nextafter(whole, torch.zeros_like(whole)))
    # A valid token even for NaN logits: other requests share the batch.
    return torch.searchsorted(sums, shares, right=True).squeeze(1).clamp_(max=sums.shape[-1] - 1)
