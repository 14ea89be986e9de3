"""Every operator's reference against its meaning in float64, and against transformers' own layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_aspects.conformance.operators import difference
from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.dispatch.define import OPERATORS
from sgl_aspects.runtime.dispatch.operators.rotary import axes_of_pairs
from tests.support.operator_cases import (
    MEANINGS,
    angles,
    cases,
    delta_inputs,
    flat,
    in_type,
    positions,
    random,
)

CASES = cases()
#: The largest error, as a share of the largest value.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def test_every_operator_has_a_case() -> None:
    assert {op for op, _ in CASES.values()} == set(OPERATORS) == set(MEANINGS)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_what_the_operator_means(name: str, dtype: torch.dtype) -> None:
    op, inputs = CASES[name]
    given = in_type(inputs, dtype)
    exact = in_type(given, torch.float64)  # rounding the inputs is not the operator's error
    before = in_type(given, dtype)
    with torch.inference_mode(), dispatch.with_preference("reference"):
        found = getattr(dispatch, op)(**given)
    wanted = MEANINGS[op](**exact)
    for one, other in zip(flat(found), flat(wanted), strict=True):
        assert difference(one, other) <= TOLERANCES[dtype], name
    spec = OPERATORS[op]
    for key, value in given.items():
        if not isinstance(value, torch.Tensor):
            continue
        if key in spec.mutates:
            assert difference(value, exact[key]) <= TOLERANCES[dtype]
        else:
            assert torch.equal(value, before[key]), f"{op} wrote to {key}, which it does not declare"


@pytest.mark.parametrize(("sections", "axes"), [((4, 2, 2), "01201200"), ((2, 3, 3), "01201201")])
def test_which_axis_a_pair_turns_by_where_they_take_turns(sections: tuple[int, ...], axes: str) -> None:
    assert "".join(map(str, axes_of_pairs(sections, True).tolist())) == axes


@pytest.mark.parametrize("name", CASES)
def test_how_a_tensor_lies_in_memory_changes_nothing(name: str) -> None:
    op, inputs = CASES[name]
    given = in_type(inputs, torch.float32)
    spread = {
        key: torch.stack((value, value), -1)[..., 0] if isinstance(value, torch.Tensor) else value
        for key, value in in_type(inputs, torch.float32).items()
    }
    with torch.inference_mode():
        wanted, found = getattr(dispatch, op)(**given), getattr(dispatch, op)(**spread)
    for one, other in zip(flat(found), flat(wanted), strict=True):
        torch.testing.assert_close(one, other)
    for key in OPERATORS[op].mutates:
        torch.testing.assert_close(spread[key], given[key])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_of_no_tokens_comes_nothing(name: str, dtype: torch.dtype) -> None:
    op, inputs = CASES[name]
    axes = {
        "x": 0, "query": 0, "key": 0, "residual": 0, "positions": -1, "router_logits": 0, "topk_ids": 0,
        "topk_weights": 0, "token_ids": 0,
    }  # fmt: skip
    if "delta_rule" in op:
        axes = dict.fromkeys(("query", "key", "value", "g", "beta"), 1)
    given = in_type(inputs, dtype)
    empty = {
        key: value.narrow(axes[key], 0, 0) if key in axes and isinstance(value, torch.Tensor) else value
        for key, value in given.items()
    }
    with torch.inference_mode():
        found = flat(getattr(dispatch, op)(**empty))
        whole = flat(getattr(dispatch, op)(**in_type(inputs, dtype)))
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in whole]
    assert found[0].numel() == 0
    assert found[0].shape[2:] == whole[0].shape[2:]
    if op == "chunk_gated_delta_rule" and given.get("initial_state") is not None:
        assert difference(found[1], given["initial_state"]) <= TOLERANCES[dtype]
        assert found[1] is not given["initial_state"]


def test_the_operator_runs_under_its_name_with_any_kind_of_arguments() -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    wanted = dispatch.rms_norm(x, weight, 1e-5)
    assert isinstance(wanted, torch.Tensor)
    torch.testing.assert_close(dispatch.call_op("rms_norm", x, weight, eps=1e-5), wanted)
    torch.testing.assert_close(dispatch.rms_norm(eps=1e-5, weight=weight, x=x), wanted)
    assert dispatch.rms_norm.__doc__ == OPERATORS["rms_norm"].reference.__doc__


# -- transformers --------------------------------------------------------------------------------------------


def close(found: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    assert difference(found, wanted) <= tolerance


def test_norms_are_those_of_llama_and_gemma() -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for layer, op in ((LlamaRMSNorm(24, 1e-5), "rms_norm"), (Gemma2RMSNorm(24, 1e-5), "gemma_rms_norm")):
        layer.weight.data = random(24, seed=1).float()
        x, residual = random(3, 24, seed=2).float(), random(3, 24, seed=3).float()
        function = getattr(dispatch, op)
        close(function(x, layer.weight, 1e-5), layer(x))
        normed, total = function(x, layer.weight, 1e-5, residual)
        close(normed, layer(x + residual))
        close(total, x + residual)


def test_gated_activations_are_those_of_llama_and_gemma() -> None:
    from transformers.activations import ACT2FN

    x = random(3, 24, seed=1).float()
    close(dispatch.silu_and_mul(x), ACT2FN["silu"](x[:, :12]) * x[:, 12:])
    close(dispatch.gelu_and_mul(x), ACT2FN["gelu_pytorch_tanh"](x[:, :12]) * x[:, 12:])
    close(dispatch.gelu_and_mul(x, "none"), ACT2FN["gelu"](x[:, :12]) * x[:, 12:])


def test_rotary_embedding_is_that_of_llama() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    cos, sin = (table.float() for table in angles(8))
    query, key, places = random(5, 4, 16, seed=1).float(), random(5, 2, 16, seed=2).float(), positions(5, 64)
    wide = (torch.cat((table, table), -1)[places] for table in (cos, sin))
    wanted = apply_rotary_pos_emb(query, key, *wide)
    for found, right in zip(dispatch.rotary_embedding(query, key, cos, sin, places), wanted):
        close(found, right)


@pytest.mark.parametrize(("model", "interleaved"), [("qwen2_vl", False), ("qwen3_vl", True)])
def test_rotary_embedding_of_several_axes_is_that_of_qwen_vl(model: str, interleaved: bool) -> None:
    import importlib

    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    layer = module.Qwen3VLTextRotaryEmbedding if interleaved else module.Qwen2VLRotaryEmbedding
    sections = (4, 2, 2)

    class Config:
        max_position_embeddings = 64
        head_dim = 16
        rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}  # noqa: RUF012

    query, key = random(5, 4, 16, seed=1).float(), random(5, 2, 16, seed=2).float()
    places = torch.stack([positions(5, 64), positions(5, 50), positions(5, 40)])
    wide_cos, wide_sin = layer(Config())(query, places[:, None, :])
    wanted = apply_rotary_pos_emb(query, key, wide_cos[0], wide_sin[0])
    cos, sin = (table.float() for table in angles(8))
    found = dispatch.mrotary_embedding(query, key, cos, sin, places, sections, interleaved)
    for one, other in zip(found, wanted):
        close(one, other)


def test_choosing_and_running_experts_is_as_in_qwen3_moe() -> None:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=16, moe_intermediate_size=12, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True
    )
    config._experts_implementation = "eager"
    block = Qwen3MoeSparseMoeBlock(config)
    torch.manual_seed(3)
    for parameter in block.parameters():
        parameter.data.normal_(std=0.3)
    x = random(7, 16, seed=1).float()
    with torch.no_grad():
        wanted = block(x[None])[0]
        logits = x @ block.gate.weight.T
        weights, ids = dispatch.topk(logits, 2)
        found = dispatch.fused_moe(x, block.experts.gate_up_proj, block.experts.down_proj, weights, ids)
    close(found, wanted)


@pytest.mark.parametrize("tokens", [1, 63, 64, 150])
def test_the_gated_delta_rule_is_that_of_qwen3_next(tokens: int) -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    given = in_type(delta_inputs(tokens), torch.float32)
    state = random(2, 2, 8, 6, seed=6).float()
    for normalize in (False, True):
        wanted, final = theirs.torch_recurrent_gated_delta_rule(
            **given, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=normalize
        )
        found, last = dispatch.chunk_gated_delta_rule(**given, initial_state=state, use_qk_l2norm=normalize)
        close(found, wanted)
        close(last, final)
        own = state.clone()
        close(dispatch.fused_recurrent_gated_delta_rule(**given, state=own, use_qk_l2norm=normalize), wanted)
        close(own, final)
