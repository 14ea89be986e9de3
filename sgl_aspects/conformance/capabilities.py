"""Checks of each capability that a platform declares. Graphs have checks of their own."""

from __future__ import annotations

import importlib.util

import torch

from sgl_aspects.conformance.check import Bench, NotApplicableError, check, require
from sgl_aspects.conformance.in_process import generating
from sgl_aspects.conformance.operators import TOLERANCES, difference, gated, random_tensor
from sgl_aspects.conformance.tiny_model import write_tiny_model


@check(write="capabilities", expects="supports_triton: a Triton kernel to run")
def triton(bench: Bench) -> str:
    if not bench.platform.capabilities.supports_triton:
        raise NotApplicableError("not declared")
    require(
        importlib.util.find_spec("triton") is not None,
        "triton to be installed where supports_triton is declared",
        "it is not",
    )
    from sgl_aspects.runtime.dispatch.triton.silu_and_mul import silu_and_mul

    x = random_tensor(3, 200, dtype=torch.float32, seed=3)
    error = difference(silu_and_mul(x.to(bench.device)).cpu(), gated(x.double()))
    require(error <= TOLERANCES[x.dtype], "silu_and_mul in Triton as in float64", f"an error of {error:.2g}")
    return "silu_and_mul"


@check(write="get_compile_backend", expects="compiled layers to give the tokens of plain ones")
def compiled(bench: Bench) -> str:
    try:
        backend = bench.platform.get_compile_backend()
    except NotImplementedError:
        raise NotApplicableError("no compiler") from None
    folder = bench.folder / "tiny-llama-compiled"
    write_tiny_model(folder)
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
    methods = platform.supported_quantization
    own = [method for method in methods if platform.get_quantization_config(method) is not None]
    if not own:
        raise NotApplicableError("no class of the platform's")
    folder = bench.folder / "tiny-llama-quantized"
    write_tiny_model(folder)
    for method in own:
        with generating(folder, quantization=method) as engine:
            engine.tokens()
    return ", ".join(own)
