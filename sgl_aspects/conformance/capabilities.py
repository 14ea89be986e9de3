"""Checks of each capability that a platform declares. Graphs have checks of their own."""

from __future__ import annotations

import importlib.util

import torch

from sgl_aspects.conformance.check import Bench, NotApplicableError, check, if_declared, require
from sgl_aspects.conformance.in_process import generating
from sgl_aspects.conformance.operators import gated, random_tensor, require_close


@check(write="capabilities", expects="supports_triton: a Triton kernel to run")
def triton(bench: Bench) -> str:
    if not bench.platform.capabilities.supports_triton:
        raise NotApplicableError("not declared")
    is_installed = importlib.util.find_spec("triton") is not None
    require(is_installed, "triton to be installed where supports_triton is declared", "it is not")
    from sgl_aspects.runtime.dispatch.triton.silu_and_mul import silu_and_mul

    x = random_tensor(3, 200, dtype=torch.float32, seed=3)
    found = silu_and_mul(x.to(bench.device))
    require_close(found, gated(x.double()), x.dtype, "silu_and_mul in Triton as in float64")
    return "silu_and_mul"


@check(write="get_compile_backend", expects="compiled layers to give the tokens of plain ones")
def compiled(bench: Bench) -> str:
    backend = if_declared(bench.platform.get_compile_backend, "no compiler")
    folder = bench.folder / "tiny-llama-compiled"
    with generating(folder, disable_graphs=True) as plain:
        right = plain.tokens()
    with generating(folder, disable_graphs=True, compile=True) as compiled:
        found = compiled.tokens()
    require(found == right, str(right), str(found))
    return f"compiled by {backend}"


@check(write="supports_fp8", expects="float8 numbers to be kept and read")
def fp8(bench: Bench) -> str:
    if not bench.platform.supports_fp8():
        raise NotApplicableError("not declared")
    exact = torch.tensor([0.0, 1.0, -1.5, 0.25, 448.0, -0.0625])
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        right = exact.to(dtype).float()
        found = exact.to(bench.device).to(dtype).float().cpu()
        require(torch.equal(found, right), f"{right.tolist()} in {dtype}", found.tolist())
    return "e4m3 and e5m2"


@check(
    write="get_quantization_config",
    expects="an engine to load and answer with each declared quantization",
)
def quantized(bench: Bench) -> str:
    platform = bench.platform
    own = [name for name in platform.supported_quantization if platform.get_quantization_config(name)]
    if not own:
        raise NotApplicableError("no class of the platform's")
    for method in own:
        with generating(bench.folder / "tiny-llama-quantized", quantization=method) as engine:
            engine.tokens()
    return ", ".join(own)
