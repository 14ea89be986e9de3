"""Experts on SGLang's GPU path: the method that launches its Triton kernels goes through dispatch."""

from __future__ import annotations

import json

import pytest

from tests.support.processes import output_of, python

pytest.importorskip("sglang")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

#: The method as it is on a GPU, but for its runner, which launches nothing here and records the call.
PROGRAM = """
import json
from types import SimpleNamespace
import sgl_aspects
sgl_aspects.load_plugins()
import torch
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.moe.utils import MoeRunnerBackend
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sgl_aspects.runtime.dispatch.operators.experts import fused_moe

def method(backend, **config):
    made = object.__new__(UnquantizedFusedMoEMethod)
    runner = SimpleNamespace(runner_backend=backend, run=lambda *_: "SGLang's own")
    for name, value in {
        "runner": runner, "use_flashinfer_cutlass": False, "use_flashinfer_trtllm_moe": False,
        "_aiter_runner": None, "w13_swiglu_interleaved": False,
        "moe_runner_config": MoeRunnerConfig(activation="silu", **config),
    }.items():
        made.__dict__[name] = value
    return made

torch.manual_seed(3)
x = torch.randn(5, 16)
layer = SimpleNamespace(w13_weight=torch.randn(4, 24, 16), w2_weight=torch.randn(4, 16, 12))
weights, ids = torch.rand(5, 2), torch.randint(4, (5, 2), dtype=torch.int32)
chosen = StandardTopKOutput(weights, ids, torch.zeros(5, 4))
given = StandardDispatchOutput(hidden_states=x, hidden_states_scale=None, topk_output=chosen)
right = fused_moe(x, layer.w13_weight, layer.w2_weight, weights, ids.long())
ours = method(MoeRunnerBackend.TRITON).forward_cuda(layer, given)
print(json.dumps({
    "type": type(ours).__name__,
    "equal": bool(torch.allclose(ours.hidden_states, right)),
    "scaled": method(MoeRunnerBackend.TRITON, routed_scaling_factor=2.5).forward_cuda(layer, given),
    "not combined": method(MoeRunnerBackend.TRITON, no_combine=True).forward_cuda(layer, given),
}))
"""


def test_the_method_of_the_triton_kernels_is_dispatched() -> None:
    variables = {"ASPECTS_OP_ATTACH": "1", "SGLANG_PLATFORM": "sgl_aspects_cpu"}
    printed = output_of(python("-W", "ignore", "-c", PROGRAM, variables=variables))
    found = json.loads(printed.splitlines()[-1])
    assert found == {
        "type": "StandardCombineInput",
        "equal": True,
        "scaled": "SGLang's own",
        "not combined": "SGLang's own",
    }
