"""Decode steps of a 1B-class model on the current platform's device: graphs, eager, and the bandwidth floor.

    python -m benchmarks.gpu_decode [--write FILE] [--layers N]

The model has the shape of Llama 3.2 1B, with random bfloat16 weights. The floor is what must be read for a
step, all weights and the keys and values of all requests, over the bandwidth that a large copy reaches on the
device. Graphs and eager steps alternate, round by round, on the same requests.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform as host
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_aspects.platforms import SRTPlatform, current_platform
from sgl_aspects.runtime import SamplingParams, ServerArgs
from sgl_aspects.runtime.messages import TokenizedRequest
from sgl_aspects.runtime.scheduling.scheduler import Scheduler

PAGE = Path(__file__).resolve().parent / "results" / "gpu.md"
BATCH_SIZES = (1, 16)
PROMPT_TOKENS = 512
ROUNDS, STEPS, WARM_UP = 5, 30, 3
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Row:
    """Milliseconds: medians over all steps, and over the rounds' averages for whole ones."""

    batch_size: int
    mode: str
    device_ms: float
    step_ms: float
    floor_ms: float


def write_model(folder: Path, layers: int) -> int:
    """Write the checkpoint; the bytes of its weights."""
    from safetensors.torch import save_file

    shape = {**SHAPE, "num_hidden_layers": layers}
    hidden, inner, kv = shape["hidden_size"], shape["intermediate_size"], 8 * shape["head_dim"]
    device = current_platform.get_device(0)

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(*size, device=device) * 0.02).to(torch.bfloat16).cpu()

    weights = {"model.embed_tokens.weight": random(shape["vocab_size"], hidden)}
    for layer in range(layers):
        sizes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": random(*size) for name, size in sizes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    weights["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape))
    return sum(tensor.nbytes for tensor in weights.values())


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


class Decoding:
    """An engine's scheduler with ``batch_size`` requests that decode, driven step by step in this process."""

    def __init__(self, scheduler: Scheduler, batch_size: int) -> None:
        self.scheduler = scheduler
        self.platform = current_platform
        runner = scheduler.model_runner
        self.graph_runner = runner.graph_runner
        self._forward: Callable[..., torch.Tensor] = runner.forward
        self._events: list[tuple[Any, Any]] = []
        runner.forward = self._timed_forward  # type: ignore[method-assign]
        generator = torch.Generator().manual_seed(batch_size)
        for number in range(batch_size):
            prompt = torch.randint(0, SHAPE["vocab_size"], (PROMPT_TOKENS,), generator=generator).tolist()
            params = SamplingParams(
                max_new_tokens=2 * ROUNDS * (STEPS + WARM_UP) + 2 * batch_size, ignore_eos=True
            )
            scheduler.add_request(TokenizedRequest(f"{batch_size}-{number}", prompt, params))
        while scheduler.waiting or any(not req.is_prefill_done for req in scheduler.running):
            scheduler.step()

    def _timed_forward(self, batch: Any) -> torch.Tensor:
        start, end = self.platform.create_event(), self.platform.create_event()
        start.record()
        logits = self._forward(batch)
        end.record()
        self._events.append((start, end))
        return logits

    def steps(self, *, graphs: bool) -> tuple[list[float], float]:
        """ms on the device of each of STEPS forward passes, and ms of a whole step on average."""
        self.scheduler.collect()
        self.scheduler.model_runner.graph_runner = self.graph_runner if graphs else None
        for _ in range(WARM_UP):
            self.scheduler.step()
        self.platform.synchronize()
        self._events.clear()
        begin = time.perf_counter()
        for _ in range(STEPS):
            self.scheduler.step()
        whole = (time.perf_counter() - begin) * 1e3 / STEPS
        self.platform.synchronize()
        return [start.elapsed_ms(end) for start, end in self._events], whole

    def end(self) -> None:
        for req in list(self.scheduler.running):
            self.scheduler.abort_request(req.rid)
        self.scheduler.model_runner.forward = self._forward  # type: ignore[method-assign]
        self.scheduler.model_runner.graph_runner = self.graph_runner


def measure(folder: Path, weight_bytes: int, bandwidth: float) -> list[Row]:
    ours, theirs = multiprocessing.Pipe()
    scheduler = Scheduler(
        ServerArgs(folder, max_total_tokens=32768, max_running_requests=max(BATCH_SIZES)), theirs
    )
    runner = scheduler.model_runner
    config = runner.config
    token_bytes = config.num_layers * 2 * config.num_kv_heads * config.head_dim * runner.dtype.itemsize
    rows = []
    for batch_size in BATCH_SIZES:
        decoding = Decoding(scheduler, batch_size)
        times: dict[str, tuple[list[float], list[float]]] = {"eager": ([], []), "graphs": ([], [])}
        for _ in range(ROUNDS):
            for mode, (device, whole) in times.items():
                found = decoding.steps(graphs=mode == "graphs" and decoding.graph_runner is not None)
                device += found[0]
                whole.append(found[1])
                while ours.poll(0):
                    ours.recv()
        assert len(scheduler.running) == batch_size
        # Half of the added length: the lengths grow evenly.
        cached = (
            sum(req.computed_tokens for req in scheduler.running) - ROUNDS * (STEPS + WARM_UP) * batch_size
        )
        floor_ms = (weight_bytes + cached * token_bytes) / bandwidth * 1e3
        decoding.end()
        for mode, (device, whole) in times.items():
            device_ms, step_ms = statistics.median(device), statistics.median(whole)
            rows.append(Row(batch_size, mode, device_ms, step_ms, floor_ms))
    return rows


def table(rows: list[Row]) -> str:
    lines = [
        "| requests | steps | device ms | × floor | whole step ms | × floor | floor ms | tokens/s |",
        "| --- " * 8 + "|",
    ]
    lines += [
        f"| {row.batch_size} | {row.mode} | {row.device_ms:.3f} | {row.device_ms / row.floor_ms:.2f} "
        f"| {row.step_ms:.3f} | {row.step_ms / row.floor_ms:.2f} | {row.floor_ms:.3f} "
        f"| {row.batch_size / row.step_ms * 1e3:.0f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_decode", description=__doc__)
    parser.add_argument(
        "--write", metavar="FILE", type=Path, nargs="?", const=PAGE, help=f"by default {PAGE.name}"
    )
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

{table(rows)}
"""
    sys.stdout.write(page)
    if arguments.write:
        arguments.write.write_text(page)


if __name__ == "__main__":
    main()
