"""Dispatch in SGLang's fused operators, against fakes of its versions: what runs, what is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_aspects.conformance.operators import difference
from sgl_aspects.engines.sglang import layers as bridge
from sgl_aspects.runtime import dispatch
from tests.support.operator_cases import angles, positions, random

#: How a version of SGLang decides which forward a layer runs.
NEWER = """
import torch
class BaseFusedOp(torch.nn.Module):
    registry = {}
    @classmethod
    def register_oot_forward(cls, op_cls, fn, platform_key):
        cls.registry.setdefault(platform_key, {})[op_cls] = fn
    def __init__(self):
        super().__init__()
        self._forward_method = None
    def _resolve_forward_method(self):
        from sglang.srt.platforms import current_platform
        if current_platform.is_out_of_tree():
            fn = self.registry.get(current_platform.get_dispatch_key_name(), {}).get(type(self))
            if fn is not None:
                return fn.__get__(self)
        return self.forward_native
    def forward(self, *args, **kwargs):
        if self._forward_method is None:
            self._forward_method = self._resolve_forward_method()
        return self._forward_method(*args, **kwargs)
"""
OLDER = """
import torch
class MultiPlatformOp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self._forward_method = self.dispatch_forward()
    def dispatch_forward(self):
        return self.forward_native
    def forward(self, *args, **kwargs):
        return self._forward_method(*args, **kwargs)
"""
LAYERS = """
import torch
from {base_module} import {base}
class SiluAndMul({base}):
    def forward_native(self, x):
        print("its own silu_and_mul")
        half = x.shape[-1] // 2
        return torch.nn.functional.silu(x[..., :half]) * x[..., half:]
class Other(SiluAndMul):
    pass
"""
PLATFORMS = """
class Platform:
    device_type = "cpu"
    def is_out_of_tree(self): return {out_of_tree}
    def get_dispatch_key_name(self): return "cpu"
current_platform = Platform()
"""
PROGRAM = """
import sgl_aspects
sgl_aspects.load_plugins()
import torch, sglang.srt.platforms
from sglang.srt.layers.activation import Other, SiluAndMul
x = torch.ones(1, 4)
print("result", SiluAndMul()(x).tolist(), Other()(x).shape[-1])
from sgl_aspects.runtime import dispatch
print("resolved", dispatch.get_manager().explain("silu_and_mul").splitlines()[0])
"""
#: As a bridged platform does it in its ``init_backend``, before and after SGLang's layers are loaded.
OWN = """
import {first}
from sgl_aspects.engines.sglang.operators import register_own
from sgl_aspects.runtime.ops import Operator, SiluAndMul
Operator.register_oot_forward(SiluAndMul, lambda x: x[..., :2] * 0 + 9, "cpu")
register_own("cpu")
"""
VENDOR = """
from sgl_aspects.runtime.dispatch import ImplKind, OpImpl
def silu_and_mul(x):
    return x[..., :2] * 0 + 7
def register(registry):
    registry.register(OpImpl("silu_and_mul", "vendor.acme.s", ImplKind.VENDOR, silu_and_mul, vendor="acme"))
"""


@pytest.fixture
def sglang(tmp_path: Path) -> Path:
    for package in ("", "srt", "srt/layers", "srt/layers/utils", "kernels", "srt/platforms"):
        (tmp_path / "sglang" / package).mkdir()
        (tmp_path / "sglang" / package / "__init__.py").touch()
    (tmp_path / "vendors" / "acme").mkdir(parents=True)
    (tmp_path / "vendors" / "acme" / "__init__.py").write_text(VENDOR)
    return tmp_path


def run(
    sglang: Path, version: str, *, out_of_tree: bool = False, program: str = PROGRAM, **variables: str
) -> str:
    (sglang / "sglang/srt/platforms/__init__.py").write_text(PLATFORMS.format(out_of_tree=out_of_tree))
    if version == "newer":
        (sglang / "sglang/kernels/fused_op.py").write_text(NEWER)
        layers = LAYERS.format(base_module="sglang.kernels.fused_op", base="BaseFusedOp")
    else:
        (sglang / "sglang/srt/layers/utils/multi_platform.py").write_text(OLDER)
        layers = LAYERS.format(base_module="sglang.srt.layers.utils.multi_platform", base="MultiPlatformOp")
    (sglang / "sglang/srt/layers/activation.py").write_text(layers)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(sglang), os.environ.get("PYTHONPATH", ""), os.getcwd())),
        "SGL_ASPECTS_OP_VENDOR_PATH": str(sglang / "vendors"),
        "SGL_ASPECTS_OP_CONTROL": "off",
        "CUDA_VISIBLE_DEVICES": "",
        **variables,
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("version", "out_of_tree"),
    [
        ("newer", True),
        pytest.param("newer", False, marks=pytest.mark.slow),
        pytest.param("older", False, marks=pytest.mark.slow),
    ],
)
def test_a_vendors_kernel_serves_sglangs_layers(sglang: Path, version: str, out_of_tree: bool) -> None:
    out = run(sglang, version, out_of_tree=out_of_tree, SGL_ASPECTS_OP_ATTACH="1")
    assert "result [[7.0, 7.0]] 2" in out
    assert out.count("its own silu_and_mul") == 1, "the subclass may be something else"
    assert "resolved silu_and_mul → vendor.acme.s" in out


@pytest.mark.parametrize("first", ["sglang.srt.layers.activation", "sys"])
def test_what_a_platform_registers_itself_runs_in_sglang_and_nothing_else(sglang: Path, first: str) -> None:
    out = run(sglang, "newer", out_of_tree=True, program=OWN.format(first=first) + PROGRAM)
    assert "result [[9.0, 9.0]] 2" in out
    assert out.count("its own silu_and_mul") == 1, "the subclass may be something else"


@pytest.mark.slow
def test_nothing_is_attached_unless_enabled_nor_where_the_policy_excludes_it(sglang: Path) -> None:
    assert run(sglang, "newer").count("its own silu_and_mul") == 2
    for out_of_tree in (True, False):
        out = run(
            sglang,
            "newer",
            out_of_tree=out_of_tree,
            SGL_ASPECTS_OP_ATTACH="1",
            SGL_ASPECTS_OP_BLACKLIST="silu_and_mul",
        )
        assert out.count("its own silu_and_mul") == 2


def test_a_wrong_setting_stops_the_engine_at_start(sglang: Path) -> None:
    out = run(sglang, "newer", SGL_ASPECTS_OP_ATTACH="1", SGL_ASPECTS_OP_PREFER="vender")
    assert "sgl-aspects: operators cannot be attached: SGL_ASPECTS_OP_PREFER: unknown token 'vender'" in out
    assert "result" not in out
    assert "SGL_ASPECTS_OP_ATTACH='2'" in run(sglang, "newer", SGL_ASPECTS_OP_ATTACH="2")


# -- the bridge -----------------------------------------------------------------------------------------


class Layer:
    """Attributes of a fused layer, as SGLang calls them."""

    variance_epsilon = 1e-5
    head_size = 16
    is_neox_style = True
    approximate = "none"
    weight: torch.Tensor
    w13_weight: torch.Tensor
    w2_weight: torch.Tensor
    apply_router_weight_on_input: bool

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_norms_through_the_bridge() -> None:
    x, residual, more = (random(3, 24, seed=seed).float() for seed in (1, 2, 3))
    layer = Layer(weight=random(24, seed=4).float())
    for op in ("rms_norm", "gemma_rms_norm"):
        through, function = getattr(bridge, op), getattr(dispatch, op)
        assert torch.equal(through(layer, x), function(x, layer.weight, 1e-5))
        for found, wanted in zip(
            through(layer, x, residual, more), function(x, layer.weight, 1e-5, residual + more)
        ):
            assert torch.equal(found, wanted)
    # SGLang passes the next product to every norm; only one that scales its input may need a fused norm.
    plain, scaled = torch.nn.Identity(), torch.nn.Identity()
    scaled.input_scale = torch.tensor(0.5)
    wanted = dispatch.rms_norm(x, layer.weight, 1e-5)
    assert isinstance(wanted, torch.Tensor)
    assert torch.equal(bridge.rms_norm(layer, x, quant_linear=plain), wanted)
    assert torch.equal(bridge.rms_norm(Layer(weight=layer.weight, _quant_linear=plain), x), wanted)
    assert bridge.rms_norm(layer, x, quant_linear=scaled) is NotImplemented
    assert bridge.rms_norm(Layer(weight=layer.weight, _quant_linear=scaled), x) is NotImplemented
    assert bridge.rms_norm(Layer(weight=layer.weight, variance_size_override=12), x) is NotImplemented
    assert torch.equal(bridge.gelu_and_mul(layer, x), dispatch.gelu_and_mul(x, "none"))


def test_rotary_embeddings_through_the_bridge() -> None:
    cos, sin = (table.float() for table in angles(8))
    query, key = random(5, 4 * 16, seed=1).float(), random(5, 2 * 16, seed=2).float()
    places, offsets = positions(5, 32), torch.arange(5)
    layer = Layer(cos_sin_cache=torch.cat((cos, sin), -1), mrope_section=[2, 3, 3])
    wanted = dispatch.rotary_embedding(query.view(5, 4, 16), key.view(5, 2, 16), cos, sin, places + offsets)
    for found, right in zip(bridge.rotary_embedding(layer, places, query, key, offsets), wanted):
        assert found.shape == (5, right.shape[1] * 16)
        assert torch.equal(found, right.flatten(1))
    assert bridge.rotary_embedding(layer, places, query, key, None, object()) is NotImplemented
    axes = torch.stack([places, places // 2, places // 3])
    turned = dispatch.mrotary_embedding(query.view(5, 4, 16), key.view(5, 2, 16), cos, sin, axes, (2, 3, 3))
    for found, right in zip(bridge.mrotary_embedding(layer, axes, query, key), turned):
        assert torch.equal(found, right.flatten(1))
    same = bridge.mrotary_embedding(layer, places, query, key)
    assert torch.equal(same[0], bridge.rotary_embedding(layer, places, query, key)[0])


def test_experts_through_the_bridge() -> None:
    logits, x = random(7, 6, seed=1).float(), random(7, 10, seed=2).float()
    weights, ids = bridge.topk(x, logits, 2, True, None, "softmax", None, False, 0)
    assert ids.dtype == torch.int32
    assert bridge.topk(x, logits, 2, True, torch.ones(6)) is NotImplemented
    assert bridge.topk(x, logits, 2, True, packed_out=torch.zeros(7, 2)) is NotImplemented
    assert bridge.topk(x, logits, 2, True, routed_scaling_factor=2.5) is NotImplemented
    layer = Layer(w13_weight=random(6, 16, 10, seed=3).float(), w2_weight=random(6, 10, 8, seed=4).float())
    config = Layer(activation="silu", apply_router_weight_on_input=False)
    found = bridge.fused_moe(layer, x, (weights, ids, logits), config)
    wanted = dispatch.fused_moe(x, layer.w13_weight, layer.w2_weight, weights, ids)
    assert difference(found, wanted) == 0
    config.apply_router_weight_on_input = True
    assert bridge.fused_moe(layer, x, (weights, ids, logits), config) is NotImplemented
