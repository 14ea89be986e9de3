"""Changes of logits before a token is chosen: penalties, biases, forbidden end tokens, grammars.

The order is the one of transformers' processors. A batch without any such setting passes untouched.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_aspects.runtime.core import Req

_FORBIDDEN = float("-inf")


class LogitAdjuster:
    """Made for the device and vocabulary of one model; ``rows`` are those of ``req_to_token``."""

    def __init__(
        self, rows: int, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device
    ) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._device = device
        self._counts: TokenCounts | None = None

    def __call__(self, logits: torch.Tensor, reqs: Sequence[Req], samples: Sequence[bool]) -> torch.Tensor:
        """Return logits [requests, vocab] unchanged, or a changed copy in float32.

        Rows of requests that get no token in this step (``samples``) are not changed.
        """
        changed = [
            (i, req) for i, req in enumerate(reqs) if samples[i] and req.sampling_params.adjusts_logits
        ]
        if not changed:
            return logits
        logits = logits.to(torch.float32, copy=True)
        self._penalise(logits, [(i, req) for i, req in changed if req.sampling_params.has_penalties])
        self._add_biases(logits, changed)
        self._forbid_ends(logits, changed)
        self._hold_to_grammars(logits, [(i, req) for i, req in changed if req.grammar is not None])
        return logits

    def _penalise(self, logits: torch.Tensor, changed: list[tuple[int, Req]]) -> None:
        if not changed:
            return
        if self._counts is None:
            self._counts = TokenCounts(self._rows, self._vocab_size, self._device)
        reqs = [req for _, req in changed]
        index = self._tensor([i for i, _ in changed])
        output, seen = self._counts.of(reqs)
        params = [req.sampling_params for req in reqs]
        repetition = self._column([p.repetition_penalty for p in params])
        scores = logits[index]
        penalised = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen, penalised, scores)
        scores -= output * self._column([p.frequency_penalty for p in params])
        scores -= (output > 0) * self._column([p.presence_penalty for p in params])
        logits[index] = scores

    def _add_biases(self, logits: torch.Tensor, changed: list[tuple[int, Req]]) -> None:
        entries = [
            (i, token, bias) for i, req in changed for token, bias in req.sampling_params.logit_bias.items()
        ]
        if entries:
            rows, tokens, biases = zip(*entries)
            values = torch.tensor(biases, dtype=logits.dtype, device=self._device)
            logits.index_put_((self._tensor(rows), self._tensor(tokens)), values, accumulate=True)

    def _forbid_ends(self, logits: torch.Tensor, changed: list[tuple[int, Req]]) -> None:
        entries = [
            (i, token)
            for i, req in changed
            if len(req.output_ids) < req.sampling_params.min_new_tokens
            for token in (*self._eos_token_ids, *req.sampling_params.stop_token_ids)
        ]
        if entries:
            rows, tokens = zip(*entries)
            logits[self._tensor(rows), self._tensor(tokens)] = _FORBIDDEN

    def _hold_to_grammars(self, logits: torch.Tensor, changed: list[tuple[int, Req]]) -> None:
        if changed:
            index = self._tensor([i for i, _ in changed])
            allowed = torch.stack([req.grammar.allowed_tokens() for _, req in changed if req.grammar])
            logits[index] = logits[index].masked_fill(~allowed.to(self._device), _FORBIDDEN)

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self._device).unsqueeze(1)


class TokenCounts:
    """The counts of each token in a request's output, by row of ``req_to_token``.

    A row is counted from the start for a new request, otherwise from the last call on.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._output = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self._seen = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        self._owners: list[Req | None] = [None] * rows
        self._counted = [0] * rows

    def of(self, reqs: Sequence[Req]) -> tuple[torch.Tensor, torch.Tensor]:
        """[requests, vocab]: times in the output; whether in prompt or output."""
        rows: list[int] = []
        tokens: list[int] = []
        for req in reqs:
            row = req.row
            if self._owners[row] is not req:
                self._begin(row, req)
            new = req.output_ids[self._counted[row] :]
            self._counted[row] += len(new)
            rows += [row] * len(new)
            tokens += new
        device = self._output.device
        if tokens:
            index = (torch.tensor(rows, device=device), torch.tensor(tokens, device=device))
            ones = torch.ones(len(tokens), dtype=torch.int32, device=device)
            self._output.index_put_(index, ones, accumulate=True)
            self._seen[index] = True
        wanted = torch.tensor([req.row for req in reqs], device=device)
        return self._output[wanted], self._seen[wanted]

    def _begin(self, row: int, req: Req) -> None:
        self._owners[row], self._counted[row] = req, 0
        self._output[row] = 0
        self._seen[row] = False
        self._seen[row, torch.tensor(req.input_ids, device=self._seen.device)] = True
