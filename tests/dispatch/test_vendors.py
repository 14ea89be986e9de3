"""The backends' functions keep the operators' contracts, on fakes of the libraries that they call.

The fakes have the signatures that those libraries publish, and compute with torch. What the real
kernels do is for a device: docs/ops.md.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from sgl_aspects.conformance.operators import difference
from sgl_aspects.errors import UnsupportedCallError
from sgl_aspects.platforms import current_platform, set_current_platform
from sgl_aspects.platforms.cpu import CpuPlatform
from sgl_aspects.platforms.identity import PlatformCapabilities
from sgl_aspects.runtime import dispatch
from sgl_aspects.runtime.dispatch import flaggems
from sgl_aspects.runtime.dispatch.define import OPERATORS
from sgl_aspects.runtime.dispatch.process import new_registry
from sgl_aspects.runtime.dispatch.vendors import ascend, cuda
from tests.support.operator_cases import cases, flat, in_type

CASES = cases()


def reference(op_name: str) -> Any:
    return OPERATORS[op_name].reference


def flag_gems() -> types.ModuleType:
    gems = types.ModuleType("flag_gems")

    def topk_softmax(weights: Any, ids: Any, rows: Any, logits: Any, renormalize: bool = False) -> None:
        found, chosen = reference("topk")(logits, weights.shape[1], renormalize)
        weights.copy_(found)
        ids.copy_(chosen)

    functions: dict[str, Any] = {
        "silu_and_mul": lambda a, b: F.silu(a) * b,
        "gelu_and_mul": lambda a, b, approximate="none": F.gelu(a, approximate=approximate) * b,
        "rms_norm": lambda x, shape, w, eps: F.rms_norm(x.float(), shape, w.float(), eps).to(x.dtype),
        "apply_rotary_pos_emb": reference("rotary_embedding"),
        "topk_softmax": topk_softmax,
        "outplace_fused_experts": reference("fused_moe"),
    }
    gems.__dict__.update(functions)
    return gems


def sgl_kernel() -> types.ModuleType:
    kernel = types.ModuleType("sgl_kernel")

    def topk_softmax(weights: Any, ids: Any, logits: Any, renormalize: bool = False) -> None:
        found, chosen = reference("topk")(logits, weights.shape[1], renormalize)
        weights.copy_(found)
        ids.copy_(chosen)

    functions: dict[str, Any] = {
        "silu_and_mul": lambda x, out: out.copy_(reference("silu_and_mul")(x)),
        "gelu_and_mul": lambda x, out: out.copy_(reference("gelu_and_mul")(x, "none")),
        "gelu_tanh_and_mul": lambda x, out: out.copy_(reference("gelu_and_mul")(x)),
        "rmsnorm": reference("rms_norm"),
        "gemma_rmsnorm": reference("gemma_rms_norm"),
        "topk_softmax": topk_softmax,
    }
    kernel.__dict__.update(functions)
    return kernel


def torch_npu() -> types.ModuleType:
    npu = types.ModuleType("torch_npu")

    def npu_rotary_mul(x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    functions: dict[str, Any] = {
        "npu_swiglu": lambda x, dim: reference("silu_and_mul")(x),
        "npu_geglu": lambda x, dim, approximate, activate_left: (
            reference("gelu_and_mul")(x, "tanh" if approximate else "none"),
            None,
        ),
        "npu_rms_norm": lambda x, w, eps: (reference("rms_norm")(x, w, eps), None),
        "npu_add_rms_norm": lambda x, r, w, eps: (reference("rms_norm")(x + r, w, eps), None, x + r),
        "npu_rotary_mul": npu_rotary_mul,
    }
    npu.__dict__.update(functions)
    return npu


BACKENDS: dict[str, tuple[Any, Any]] = {
    "flag_gems": (flaggems, flag_gems),
    "sgl_kernel": (cuda, sgl_kernel),
    "torch_npu": (ascend, torch_npu),
}


SERVED = [
    (library, name)
    for library, (module, _) in BACKENDS.items()
    for name, (op, _) in CASES.items()
    if hasattr(module, op)
]


@pytest.mark.parametrize(("library", "name"), SERVED)
def test_a_backends_function_keeps_the_operators_contract(
    library: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, make = BACKENDS[library]
    monkeypatch.setitem(sys.modules, library, make())
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    op, inputs = CASES[name]
    function = getattr(backend, op)
    given, wanted_from = in_type(inputs, torch.float32), in_type(inputs, torch.float32)
    before = in_type(inputs, torch.float32)
    try:
        found = function(**given)
    except UnsupportedCallError:
        assert all(torch.equal(a, b) for a, b in zip(flat_inputs(given), flat_inputs(before)))
        return
    wanted = new_registry().spec(op).reference(**wanted_from)
    for one, other in zip(flat(found), flat(wanted), strict=True):
        assert one.dtype == other.dtype
        assert difference(one, other) < 1e-5
    for one, other in zip(flat_inputs(given), flat_inputs(wanted_from)):
        assert difference(one, other) < 1e-5, "what the operator mutates, and nothing else"


def flat_inputs(inputs: dict[str, Any]) -> list[torch.Tensor]:
    return [value for value in inputs.values() if isinstance(value, torch.Tensor)]


def test_flaggems_serves_where_the_platform_has_triton_and_refuses_what_it_does_not_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Chip(CpuPlatform):
        capabilities = PlatformCapabilities(supports_triton=True)

    set_current_platform(CpuPlatform())
    assert flaggems.available() == "platform cpu declares no Triton"
    set_current_platform(Chip())
    assert str(flaggems.available()).startswith("the package flag_gems is not installed")
    for name, module in {"flag_gems": flag_gems(), "triton": types.ModuleType("triton")}.items():
        module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, name, module)
    assert flaggems.available() is True
    monkeypatch.setattr(flaggems, "DEVICE_TYPES", frozenset({"cpu"}))
    registry = new_registry()
    manager = dispatch.OpManager(registry)
    x = torch.randn(2, 8)
    chosen = manager.select("topk", x.dtype, x.device)
    assert chosen.impl.impl_id == "default.flaggems.topk"
    weights, _ = manager.call_op("topk", x, 2, scoring="sigmoid")
    assert torch.equal(weights, reference("topk")(x, 2, scoring="sigmoid")[0]), "the reference served"
    float64 = manager.select("topk", torch.float64, x.device)
    assert float64.impl.impl_id == "reference.topk"
    delta = manager.select("chunk_gated_delta_rule", x.dtype, x.device)
    assert delta.impl.impl_id == "reference.chunk_gated_delta_rule"


def test_another_platform_serves_the_next_call() -> None:
    x = torch.randn(4, 8)

    def on_chips() -> bool:
        return current_platform.get_dispatch_key_name() == "chip"

    class Keyed(CpuPlatform):
        def get_dispatch_key_name(self) -> str:
            return "chip"

    registry = dispatch.get_manager().registry
    registry.register(
        dispatch.OpImpl(
            "silu_and_mul",
            "vendor.chip",
            dispatch.ImplKind.VENDOR,
            torch.zeros_like,
            "chip",
            is_available=on_chips,
        )
    )
    assert dispatch.silu_and_mul(x).any()
    set_current_platform(Keyed())
    assert not dispatch.silu_and_mul(x).any()
    set_current_platform(None)
    assert dispatch.silu_and_mul(x).any()
