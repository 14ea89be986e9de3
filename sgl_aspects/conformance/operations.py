"""Operations of a device besides computing."""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from sgl_aspects.conformance.check import Bench, NotApplicableError, check, require


@check(write="get_device", expects="what is copied to the device to come back unchanged")
def copies(bench: Bench) -> str:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
    for dtype in dtypes:
        there = torch.arange(-500, 500).to(dtype)
        back = there.to(bench.device).cpu()
        require(back.dtype == dtype and torch.equal(back, there), f"{dtype} unchanged", back.dtype)
    return f"{len(dtypes)} types"


@check(write="inference_mode", expects="no gradients inside, as before outside")
def inference_mode(bench: Bench) -> str:
    weight = torch.ones(2, device=bench.device, requires_grad=True)
    with bench.platform.inference_mode():
        inside = (weight * 2).requires_grad
    outside = (weight * 2).requires_grad
    require(not inside, "results without gradients inside", "results that require them")
    require(outside, "gradients again afterwards", "none")
    return "left as it was entered"


@check(write="use_stream", expects="work on a second stream to be done when waited for")
def streams(bench: Bench) -> str:
    platform = bench.platform
    platform.current_stream()
    stream = platform.create_stream()
    if stream is None:
        raise NotApplicableError("the device has one stream")
    ones = torch.ones(1000, 1000, device=bench.device)
    platform.synchronize()
    with platform.use_stream(stream):
        product = ones @ ones
        inside = platform.current_stream()
    platform.synchronize()
    require(inside == stream, f"{stream} inside use_stream", inside, "current_stream")
    require(platform.current_stream() != stream, "the stream before, afterwards", stream)
    found = product[500, 500].item()
    require(found == 1000.0, "1000.0, computed on the second stream", found, "synchronize")
    return "a second stream"


@check(write="reindex_device_id", expects="the variable restored, also after an error")
def reindex(bench: Bench) -> str:
    platform, variable = bench.platform, bench.platform.visible_devices_variable
    before = dict(os.environ)
    last = platform.device_count() - 1
    with suppress(_DeliberateError), platform.reindex_device_id(last) as device_id:
        inside = os.environ.get(variable) if variable else None
        raise _DeliberateError
    changed = sorted(key for key in {*before, *os.environ} if before.get(key) != os.environ.get(key))
    require(not changed, "the environment as it was, after an error", changed)
    if variable is None:
        require(device_id == last, f"device id {last}, without a variable", device_id)
        return "the device has no variable"
    require(device_id == 0, "device id 0 in the narrowed process", device_id)
    require(bool(inside) and "," not in str(inside), f"{variable} naming one device", inside)
    return f"{variable}={inside}"


class _DeliberateError(Exception):
    """Raised to check the state that is left behind."""


@check(write="seed_everything", expects="a seed to give the same numbers, another seed others")
def seed(bench: Bench) -> str:
    def draw(seed: int) -> torch.Tensor:
        bench.platform.seed_everything(seed)
        return torch.rand(1000, device=bench.device).cpu()

    require(torch.equal(draw(7), draw(7)), "the same numbers after the same seed", "others")
    require(not torch.equal(draw(7), draw(8)), "other numbers after another seed", "the same")
    return "on the device"


@check(write="verify_quantization", expects="an unknown method to be refused")
def quantization(bench: Bench) -> str:
    with suppress(ValueError):
        bench.platform.verify_quantization("no-such-method")
        require(False, "a ValueError for 'no-such-method'", "silence")
    declared = bench.platform.supported_quantization
    for method in declared:
        bench.platform.verify_quantization(method)
    return ", ".join(declared) or "none declared"
