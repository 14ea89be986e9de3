"""Decode steps of a 1B-class model on the current platform's device: graphs, eager, and the bandwidth floor.

    python -m benchmarks.gpu_decode [--write FILE] [--layers N]

The model has the shape of Llama 3.2 1B, with random bfloat16 weights. The floor is what must be read for a
step, all weights and the keys and values of all requests, over the bandwidth that a large copy reaches on the
device. Graphs and eager steps alternate, round by round, on the same requests.
"""

from __future__ import annotations

import argparse
import platform as host
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.stepped import SHAPE, SteppedEngine, write_model
from benchmarks.turns import publish
from sgl_aspects.platforms import SRTPlatform, current_platform

PAGE = Path(__file__).resolve().parent / "results" / "gpu.md"
BATCH_SIZES = (1, 16)
PROMPT_TOKENS = 512
ROUNDS, STEPS, WARM_UP = 5, 30, 3


def copy_bandwidth(platform: SRTPlatform) -> float:
    """Bytes read and written in a second by a copy of 2 GiB on the device."""
    source = torch.randint(0, 255, (2**31,), dtype=torch.uint8, device=platform.get_device(0))
    target = torch.empty_like(source)
    times = []
    for _ in range(12):
        start, end = platform.create_event(), platform.create_event()
        start.record()
        target.copy_(source)
        end.record()
        platform.synchronize()
        times.append(start.elapsed_ms(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times[2:])


class Timed:
    """The device's times of the engine's forward passes."""

    def __init__(self, engine: SteppedEngine) -> None:
        self.engine = engine
        self._events: list[tuple[Any, Any]] = []
        self._forward: Callable[..., torch.Tensor] = engine.runner.forward
        engine.runner.forward = self._timed_forward  # type: ignore[method-assign]

    def _timed_forward(self, batch: Any) -> torch.Tensor:
        start, end = current_platform.create_event(), current_platform.create_event()
        start.record()
        logits = self._forward(batch)
        end.record()
        self._events.append((start, end))
        return logits

    def steps(self) -> tuple[list[float], float]:
        """ms on the device of each of STEPS forward passes, and ms of a whole step on average."""
        for _ in range(WARM_UP):
            self.engine.step()
        current_platform.synchronize()
        self._events.clear()
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.engine.step()
        whole = (time.perf_counter() - begin) * 1e3 / STEPS
        current_platform.synchronize()
        return [start.elapsed_ms(end) for start, end in self._events], whole


def measure(folder: Path, weight_bytes: int, bandwidth: float) -> list[str]:
    """The rows of a table: medians over all steps, and over the rounds' averages for whole ones."""
    engine = SteppedEngine(folder, max(BATCH_SIZES))
    timed, config, running = Timed(engine), engine.runner.config, engine.scheduler.running
    token_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim * engine.runner.dtype.itemsize
    rows = []
    for batch_size in BATCH_SIZES:
        engine.add_requests(batch_size, PROMPT_TOKENS, 2 * ROUNDS * (STEPS + WARM_UP) + 2 * batch_size)
        engine.prefill()
        times: dict[str, tuple[list[float], list[float]]] = {"eager": ([], []), "graphs": ([], [])}
        for _ in range(ROUNDS):
            for mode, (device, whole) in times.items():
                engine.use_graphs(mode == "graphs")
                found = timed.steps()
                device += found[0]
                whole.append(found[1])
        if len(running) != batch_size:
            raise RuntimeError(f"{len(running)} of {batch_size} requests still decode: raise their tokens")
        # Half of the added length: the lengths grow evenly.
        cached = sum(req.computed_tokens for req in running) - ROUNDS * (STEPS + WARM_UP) * batch_size
        floor_ms = (weight_bytes + cached * token_bytes) / bandwidth * 1e3
        engine.finish()
        for mode, (device, whole) in times.items():
            device_ms, step_ms = statistics.median(device), statistics.median(whole)
            rows.append(
                f"| {batch_size} | {mode} | {device_ms:.3f} | {device_ms / floor_ms:.2f} | {step_ms:.3f} "
                f"| {step_ms / floor_ms:.2f} | {floor_ms:.3f} | {batch_size / step_ms * 1e3:.0f} |"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_decode", description=__doc__)
    into = f"by default {PAGE.name}"
    parser.add_argument("--write", metavar="FILE", type=Path, nargs="?", const=PAGE, help=into)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    arguments = parser.parse_args()
    platform = current_platform
    platform.set_device(platform.get_device(0))
    bandwidth = copy_bandwidth(platform)
    with tempfile.TemporaryDirectory(prefix="sgl-aspects-bench-") as folder:
        weight_bytes = write_model(Path(folder), arguments.layers)
        rows = measure(Path(folder), weight_bytes, bandwidth)
    page = f"""# Performance on a GPU

Made by `make bench-gpu`: decode steps of a model in the shape of Llama 3.2 1B ({arguments.layers} layers,
random bfloat16 weights, {weight_bytes / 1e9:.2f} GB), {PROMPT_TOKENS} prompt tokens and up to
{2 * ROUNDS * (STEPS + WARM_UP)} new ones a request, medians; graphs and eager steps alternate on the same
requests.
The floor is weights, keys and values over the {bandwidth / 1e12:.2f} TB/s that a copy of 2 GiB reaches (bytes
read and written). *Device* is the forward pass by the device's events; *whole step* is scheduling, forward,
sampling and sending, on the host's clock, averaged over {STEPS} steps: with graphs, a step is scheduled while
the one before it runs. {platform.get_device_name(0)}, torch {torch.__version__}, Python
{host.python_version()}.

| requests | steps | device ms | × floor | whole step ms | × floor | floor ms | tokens/s |
{"| --- " * 8}|
{chr(10).join(rows)}
"""
    publish(page, arguments.write)


if __name__ == "__main__":
    main()
