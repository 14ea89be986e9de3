"""Repeatability: seeds, operators and attention."""

from __future__ import annotations

import torch

from sgl_aspects.conformance.attention import backend_names, make_step
from sgl_aspects.conformance.check import Bench, check, require
from sgl_aspects.conformance.operators import random_tensor


@check(write="seed_everything", expects="a seed to give the same numbers, another seed others")
def seed(bench: Bench) -> str:
    def draw(seed: int) -> torch.Tensor:
        bench.platform.seed_everything(seed)
        return torch.rand(1000, device=bench.device).cpu()

    require(torch.equal(draw(7), draw(7)), "the same numbers after the same seed", "others")
    require(not torch.equal(draw(7), draw(8)), "other numbers after another seed", "the same")
    return "on the device"


@check(write="init_backend", expects="a product to be the same, bit for bit, each time")
def product(bench: Bench) -> str:
    left = random_tensor(64, 300, dtype=torch.float32, seed=1).to(bench.device)
    right = random_tensor(300, 128, dtype=torch.float32, seed=2).to(bench.device)
    first = (left @ right).cpu()
    for _ in range(5):
        require(torch.equal((left @ right).cpu(), first), "the same bits", "others")
    return "5 of 5"


@check(write="get_attention_backends", expects="attention to be the same, bit for bit")
def attention(bench: Bench) -> str:
    requests = ((5, 1), (9, 1), (4, 4), (0, 13))
    for name in backend_names(bench):
        outputs = []
        for _ in range(3):
            with bench.platform.inference_mode():
                step = make_step(bench, name, requests, heads=6, kv_heads=2, dtype=torch.float32)
                outputs.append(step.run().cpu())
        same = all(torch.equal(output, outputs[0]) for output in outputs)
        require(same, "the same bits", "others", f"attention backend {name!r}")
    return "3 of 3"
