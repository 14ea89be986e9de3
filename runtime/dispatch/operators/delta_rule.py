"""Linear attention by the gated delta rule, token by token and in chunks.

Each head holds a state S [key_dim, value_dim]. A token decays it by exp(g), subtracts the state's prediction
for its key, and adds the rest of its value:

    S ← exp(g) S;   S ← S + k ⊗ beta (v - Sᵀ k);   output = Sᵀ q
"""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_aspects.runtime.dispatch.define import operator


@operator(mutates=("state",))
def fused_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
) -> Tensor:
    """Token by token; ``state`` [batch, value_heads, key_dim, value_dim] is updated in place.

    query and key [batch, tokens, heads, key_dim]; value [batch, tokens, value_heads, value_dim]; g
    (logarithms, at most 0) and beta [batch, tokens, value_heads]. Several value heads may share a key head.
    ``scale`` of the queries is key_dim ** -0.5 where None. Returns like value.
    """
    if value.shape[1] == 0:
        return torch.empty_like(value)
    q, k, v, decay, rate, exact = _prepared(query, key, value, g, beta, scale, use_qk_l2norm)
    current = state.to(exact)
    outputs = []
    for token in range(q.shape[2]):
        current = current * decay[:, :, token, None, None].exp()
        known = (current * k[:, :, token, :, None]).sum(-2)
        change = (v[:, :, token] - known) * rate[:, :, token, None]
        current = current + k[:, :, token, :, None] * change[:, :, None, :]
        outputs.append((current * q[:, :, token, :, None]).sum(-2))
    state.copy_(current)
    return torch.stack(outputs, dim=1).to(value.dtype)


@operator()
def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Compute the same in chunks of tokens, for prompts: (outputs, the state after the last token), both new.

    Within a chunk the changes solve a triangular system, (1 + A) changes = beta (v - the state's prediction),
    where A holds the overlap of each key with those before it.
    """
    q, k, v, decay, rate, exact = _prepared(query, key, value, g, beta, scale, use_qk_l2norm)
    batch, heads, tokens, key_dim = k.shape
    if initial_state is None:
        state = torch.zeros(batch, heads, key_dim, v.shape[-1], dtype=exact, device=v.device)
    else:
        state = initial_state.to(exact, copy=True)
    if tokens == 0:
        return torch.empty_like(value), state
    outputs = []
    for start in range(0, tokens, chunk_size):
        part = slice(start, min(start + chunk_size, tokens))
        qc, kc, vc, rc = q[:, :, part], k[:, :, part], v[:, :, part], rate[:, :, part, None]
        faded = decay[:, :, part].cumsum(-1)
        between = (faded[..., :, None] - faded[..., None, :]).tril().exp().tril()
        since_start = faded.exp()[..., None]
        overlap = (rc * kc @ kc.transpose(-1, -2) * between).tril(-1)
        wanted = rc * (vc - since_start * kc @ state)
        changes = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
        outputs.append(since_start * qc @ state + (qc @ kc.transpose(-1, -2) * between) @ changes)
        until_end = (faded[..., -1:] - faded).exp()[..., None]
        state = state * faded[..., -1, None, None].exp() + (kc * until_end).transpose(-1, -2) @ changes
    output = torch.cat(outputs, dim=2).transpose(1, 2).to(value.dtype)
    return output.contiguous(), state


def _prepared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    use_qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, torch.dtype]:
    """Heads before tokens, in float32 at least, keys repeated for the value heads that share them."""
    exact = torch.float64 if value.dtype == torch.float64 else torch.float32
    q, k, v, decay, rate = (x.transpose(1, 2).to(exact) for x in (query, key, value, g, beta))
    if use_qk_l2norm:
        q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    shared = v.shape[1] // k.shape[1]
    if shared > 1:
        q, k = q.repeat_interleave(shared, dim=1), k.repeat_interleave(shared, dim=1)
    factor = key.shape[-1] ** -0.5 if scale is None else scale
    return q * factor, k, v, decay, rate, exact
