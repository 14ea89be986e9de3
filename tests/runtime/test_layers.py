"""Layers, against their definitions."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch

from sgl_aspects.engines.embedded.details import ROLES
from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.loader.model_config import MoEConfig
from sgl_aspects.runtime.ops import Linear, TopKExperts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 35, 40])
def test_packed_products_equal_the_reference(dtype: torch.dtype, rows: int) -> None:
    linear = Linear(48, 96, bias=True, dtype=dtype)
    torch.manual_seed(1)
    assert linear.bias is not None
    linear.weight.data.normal_()
    linear.bias.data.normal_()
    x = torch.randn(rows, 48).to(dtype)
    with torch.inference_mode():
        expected = torch.nn.functional.linear(x, linear.weight, linear.bias)
        linear.prepare_weights()
        torch.testing.assert_close(
            linear(x), expected, rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=1e-4
        )


def test_prompts_of_all_lengths_leave_few_kernels_behind() -> None:
    linear = Linear(64, 128, bias=False, dtype=torch.float32)
    linear.weight.data.normal_()
    linear.prepare_weights()
    memory = psutil.Process().memory_info
    with torch.inference_mode():
        linear(torch.ones(1, 64))
        before = memory().rss
        for rows in range(1, 513):
            assert linear(torch.ones(rows, 64)).shape == (rows, 128)
    # A kernel for each of them would be 140 MiB.
    assert memory().rss - before < 48 << 20


@pytest.mark.parametrize(
    ("settings", "name"),
    [({}, "topk"), ({"num_groups": 2}, "grouped_topk"), ({"has_correction_bias": True}, "grouped_topk")],
)
def test_a_router_is_traced_under_the_operator_that_it_calls(
    settings: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []
    for op_name in ("topk", "grouped_topk"):
        original = getattr(dispatch, op_name)

        def counted(*args: Any, op_name: str = op_name, original: Any = original) -> Any:
            called.append(op_name)
            return original(*args)

        monkeypatch.setattr(dispatch, op_name, counted)
    moe = MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=16, **settings)
    layer, logits = TopKExperts(moe), torch.randn(3, 8)
    layer(logits, torch.zeros(8) if moe.has_correction_bias else None)
    assert called == [ROLES["operator"].reads["operator"]((layer, logits), {})] == [name]
