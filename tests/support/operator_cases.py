"""Inputs for each dispatched operator, and its meaning in float64, mostly element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Inputs = dict[str, Any]


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def positions(tokens: int, below: int) -> torch.Tensor:
    return (torch.arange(tokens) * 37 + 5) % below


def angles(pairs: int, count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [count, pairs]."""
    frequencies = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    table = torch.outer(torch.arange(count, dtype=torch.float64), frequencies)
    return table.cos(), table.sin()


# -- meanings ---------------------------------------------------------------------------------------------


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def gelu(x: torch.Tensor, approximate: str) -> torch.Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def silu_and_mul(x: torch.Tensor) -> Any:
    half = x.shape[-1] // 2
    return x[..., :half] * sigmoid(x[..., :half]) * x[..., half:]


def gelu_and_mul(x: torch.Tensor, approximate: str = "tanh") -> Any:
    half = x.shape[-1] // 2
    return gelu(x[..., :half], approximate) * x[..., half:]


def rms_norm(x: Any, weight: Any, eps: float = 1e-6, residual: Any = None) -> Any:
    total = x if residual is None else x + residual
    normed = total / (total.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    return normed if residual is None else (normed, total)


def gemma_rms_norm(x: Any, weight: Any, eps: float = 1e-6, residual: Any = None) -> Any:
    return rms_norm(x, weight + 1, eps, residual)


def linear(x: Any, weight: Any, bias: Any = None, packed: Any = None) -> Any:
    return torch.einsum("ti,oi->to", x, weight) + (0 if bias is None else bias)


def embedding(token_ids: Any, weight: Any) -> Any:
    return torch.stack([weight[int(token)] for token in token_ids])


def rotary_embedding(
    query: Any, key: Any, cos: Any, sin: Any, positions: Any, interleaved: bool = False
) -> Any:
    pairs = cos.shape[-1]

    def turned(x: torch.Tensor) -> torch.Tensor:
        output = x.clone()
        for token, position in enumerate(positions.tolist()):
            for pair in range(pairs):
                one, two = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + pairs)
                c, s = cos[position, pair], sin[position, pair]
                output[token, :, one] = x[token, :, one] * c - x[token, :, two] * s
                output[token, :, two] = x[token, :, two] * c + x[token, :, one] * s
        return output

    return turned(query), turned(key)


def mrotary_embedding(
    query: Any, key: Any, cos: Any, sin: Any, positions: Any, sections: Any, section_interleaved: bool = False
) -> Any:
    axes: list[int] = []
    if section_interleaved:
        left = list(sections)
        axis = 0
        while any(left):
            # In turn while the others have some; then the first alone.
            if axis and not left[axis]:
                axes.append(0)
                left[0] -= 1
            else:
                axes.append(axis)
                left[axis] -= 1
            axis = (axis + 1) % len(left)
    else:
        for axis, count in enumerate(sections):
            axes += [axis] * count
    pairs = cos.shape[-1]

    def turned(x: torch.Tensor) -> torch.Tensor:
        output = x.clone()
        for token in range(len(x)):
            for pair in range(pairs):
                position = int(positions[axes[pair], token])
                c, s = cos[position, pair], sin[position, pair]
                output[token, :, pair] = x[token, :, pair] * c - x[token, :, pair + pairs] * s
                output[token, :, pair + pairs] = x[token, :, pair + pairs] * c + x[token, :, pair] * s
        return output

    return turned(query), turned(key)


def topk(router_logits: Any, k: int, renormalize: bool = True, scoring: str = "softmax") -> Any:
    exponentials = torch.exp(router_logits - router_logits.amax(-1, keepdim=True))
    scores = exponentials / exponentials.sum(-1, keepdim=True)
    if scoring == "sigmoid":
        scores = sigmoid(router_logits)
    ids = scores.argsort(-1, descending=True)[:, :k]
    weights = torch.stack([row[chosen] for row, chosen in zip(scores, ids)])
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), ids


def fused_moe(
    x: Any, gate_up_weight: Any, down_weight: Any, topk_weights: Any, topk_ids: Any, activation: str = "silu"
) -> Any:
    output = torch.zeros_like(x)
    for token in range(len(x)):
        for place in range(topk_ids.shape[1]):
            expert = int(topk_ids[token, place])
            both = gate_up_weight[expert] @ x[token]
            half = len(both) // 2
            gate = both[:half] * sigmoid(both[:half]) if activation == "silu" else gelu(both[:half], "tanh")
            output[token] += topk_weights[token, place] * (down_weight[expert] @ (gate * both[half:]))
    return output


def delta_rule(
    query: Any, key: Any, value: Any, g: Any, beta: Any, state: Any, scale: Any, normalize: bool
) -> Any:
    """(outputs, final state), one batch entry, head and token after the other."""
    if normalize:
        query, key = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    batch, tokens, heads, key_dim = key.shape
    value_heads, shared = value.shape[2], value.shape[2] // heads
    scale = key_dim**-0.5 if scale is None else scale
    output, state = torch.zeros_like(value), state.clone()
    for entry in range(batch):
        for head in range(value_heads):
            memory = state[entry, head]
            for token in range(tokens):
                k, q = key[entry, token, head // shared], query[entry, token, head // shared] * scale
                memory = memory * torch.exp(g[entry, token, head])
                change = (value[entry, token, head] - memory.T @ k) * beta[entry, token, head]
                memory = memory + torch.outer(k, change)
                output[entry, token, head] = memory.T @ q
            state[entry, head] = memory
    return output, state


def chunk_gated_delta_rule(
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    initial_state: Any = None,
    scale: Any = None,
    use_qk_l2norm: bool = False,
) -> Any:
    if initial_state is None:
        initial_state = torch.zeros(
            key.shape[0], value.shape[2], key.shape[-1], value.shape[-1], dtype=torch.float64
        )
    return delta_rule(query, key, value, g, beta, initial_state, scale, use_qk_l2norm)


def fused_recurrent_gated_delta_rule(
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    state: Any,
    scale: Any = None,
    use_qk_l2norm: bool = False,
) -> Any:
    """The output, and the state in place."""
    output, final = delta_rule(query, key, value, g, beta, state, scale, use_qk_l2norm)
    state.copy_(final)
    return output


def grouped_topk(
    router_logits: Any,
    k: int,
    num_groups: int = 1,
    topk_groups: int = 1,
    correction_bias: Any = None,
    group_by_top2: bool = False,
    renormalize: bool = True,
    scoring: str = "softmax",
) -> Any:
    scores = router_logits.softmax(-1) if scoring == "softmax" else sigmoid(router_logits)
    ids = []
    for row in (scores if correction_bias is None else scores + correction_bias).tolist():
        size = len(row) // num_groups
        groups = [list(range(start, start + size)) for start in range(0, len(row), size)]

        def quality(group: list[int], row: list[float] = row) -> float:
            best = sorted(row[expert] for expert in group)
            return best[-1] + best[-2] if group_by_top2 else best[-1]

        among = [expert for group in sorted(groups, key=quality)[-topk_groups:] for expert in group]
        ids.append(sorted(among, key=row.__getitem__, reverse=True)[:k])
    chosen = torch.tensor(ids)
    weights = scores.gather(1, chosen)
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights), chosen


MEANINGS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        silu_and_mul, gelu_and_mul, rms_norm, gemma_rms_norm, linear, embedding, rotary_embedding,
        mrotary_embedding, topk, grouped_topk, fused_moe,
        chunk_gated_delta_rule, fused_recurrent_gated_delta_rule,
    )
}  # fmt: skip


# -- inputs -----------------------------------------------------------------------------------------------


def delta_inputs(tokens: int, heads: int = 2, value_heads: int = 2, batch: int = 2) -> Inputs:
    return {
        "query": random(batch, tokens, heads, 8, seed=1),
        "key": random(batch, tokens, heads, 8, seed=2) / 3,
        "value": random(batch, tokens, value_heads, 6, seed=3),
        "g": -random(batch, tokens, value_heads, seed=4).abs() * 0.2,
        "beta": sigmoid(random(batch, tokens, value_heads, seed=5)),
    }


def cases() -> dict[str, tuple[str, Inputs]]:
    """A name for each case → operator and inputs in float64."""
    cos, sin = angles(8)
    turning = {"query": random(5, 4, 16, seed=1), "key": random(5, 2, 16, seed=2), "cos": cos, "sin": sin}
    part = {**turning, "query": random(5, 4, 24, seed=1), "key": random(5, 2, 24, seed=2)}
    axes = torch.stack([positions(5, 64), positions(5, 50), positions(5, 40)])
    logits = random(7, 12, seed=9)
    weights, ids = topk(logits, 3)
    experts = {
        "x": random(7, 10, seed=1),
        "gate_up_weight": random(12, 16, 10, seed=2, scale=0.3),
        "down_weight": random(12, 10, 8, seed=3, scale=0.3),
        "topk_weights": weights,
        "topk_ids": ids,
    }
    state = random(2, 2, 8, 6, seed=6)
    rows, weight = random(3, 24, seed=1), random(24, seed=2)
    chosen_by = {"router_logits": logits, "k": 3}
    return {
        "silu": ("silu_and_mul", {"x": rows}),
        "silu of three axes": ("silu_and_mul", {"x": random(2, 3, 24, seed=1)}),
        "gelu": ("gelu_and_mul", {"x": rows}),
        "gelu, exact": ("gelu_and_mul", {"x": rows, "approximate": "none"}),
        "norm": ("rms_norm", {"x": rows, "weight": weight, "eps": 1e-5}),
        "norm with residual": ("rms_norm", {"x": rows, "weight": weight, "residual": random(3, 24, seed=5)}),
        "gemma": ("gemma_rms_norm", {"x": rows, "weight": weight}),
        "gemma with residual": (
            "gemma_rms_norm", {"x": rows, "weight": weight, "eps": 1e-5, "residual": random(3, 24, seed=5)}
        ),
        "linear": ("linear", {"x": rows, "weight": random(7, 24, seed=2), "bias": random(7, seed=3)}),
        "linear without bias": ("linear", {"x": rows, "weight": random(7, 24, seed=2)}),
        "embedding": ("embedding", {"token_ids": positions(5, 20), "weight": random(20, 8, seed=1)}),
        "rotary": ("rotary_embedding", {**turning, "positions": positions(5, 64)}),
        "rotary of a part": ("rotary_embedding", {**part, "positions": positions(5, 64)}),
        "rotary, interleaved": (
            "rotary_embedding", {**turning, "positions": positions(5, 64), "interleaved": True}
        ),
        "mrotary": ("mrotary_embedding", {**turning, "positions": axes, "sections": (2, 3, 3)}),
        "mrotary, interleaved": (
            "mrotary_embedding",
            {**turning, "positions": axes, "sections": (4, 2, 2), "section_interleaved": True},
        ),
        "topk": ("topk", {"router_logits": logits, "k": 3}),
        "topk as it is": ("topk", {"router_logits": logits, "k": 3, "renormalize": False}),
        "topk by sigmoid": ("topk", {"router_logits": logits, "k": 2, "scoring": "sigmoid"}),
        "topk of groups": ("grouped_topk", {**chosen_by, "num_groups": 4, "topk_groups": 2}),
        "topk of groups with a bias": (
            "grouped_topk",
            {**chosen_by, "num_groups": 3, "topk_groups": 2, "correction_bias": random(12, seed=4, scale=0.3),
             "group_by_top2": True, "renormalize": False, "scoring": "sigmoid"},
        ),
        "experts": ("fused_moe", experts),
        "experts with gelu": ("fused_moe", {**experts, "activation": "gelu"}),
        "delta rule": ("chunk_gated_delta_rule", delta_inputs(5)),
        "delta rule over chunks": ("chunk_gated_delta_rule", {**delta_inputs(150), "initial_state": state}),
        "delta rule, shared keys": (
            "chunk_gated_delta_rule",
            {**delta_inputs(70, value_heads=4), "use_qk_l2norm": True, "scale": 0.5},
        ),
        "recurrent": ("fused_recurrent_gated_delta_rule", {**delta_inputs(1), "state": state}),
        "recurrent, several tokens": (
            "fused_recurrent_gated_delta_rule",
            {**delta_inputs(6), "state": state, "use_qk_l2norm": True},
        ),
    }  # fmt: skip


def in_type(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Copies, floating ones in ``dtype``."""

    def converted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(dtype, copy=True) if value.is_floating_point() else value.clone()

    return {name: converted(value) for name, value in inputs.items()}


def flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [t for part in value for t in flat(part)]
