"""The embedded engine's scheduler in this process, step by step, with a model of a billion parameters."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import torch

from sgl_aspects.platforms import current_platform
from sgl_aspects.runtime import SamplingParams, ServerArgs
from sgl_aspects.runtime.messages import TokenizedRequest
from sgl_aspects.runtime.scheduling.scheduler import Scheduler

#: The shape of Llama 3.2 1B.
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


def write_model(folder: Path, layers: int) -> int:
    """Write a checkpoint of random bfloat16 weights; return their bytes."""
    from safetensors.torch import save_file

    hidden, inner, kv = SHAPE["hidden_size"], SHAPE["intermediate_size"], 8 * SHAPE["head_dim"]
    device = current_platform.get_device(0)

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(*size, device=device) * 0.02).to(torch.bfloat16).cpu()

    weights = {"model.embed_tokens.weight": random(SHAPE["vocab_size"], hidden)}
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
    folder.mkdir(exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
    return sum(tensor.nbytes for tensor in weights.values())


class SteppedEngine:
    """A scheduler whose steps the caller makes."""

    def __init__(self, model: Path, most_requests: int) -> None:
        self._ours, theirs = multiprocessing.Pipe()
        arguments = ServerArgs(model, max_total_tokens=32768, max_running_requests=most_requests)
        self.scheduler = Scheduler(arguments, theirs)
        self.runner = self.scheduler.model_runner
        self._graph_runner = self.runner.graph_runner
        self._requests = 0

    def use_graphs(self, yes: bool) -> None:
        self.scheduler.collect()
        self.runner.graph_runner = self._graph_runner if yes else None

    def add_requests(self, count: int, prompt_tokens: int, new_tokens: int) -> None:
        for _ in range(count):
            self._requests += 1
            generator = torch.Generator().manual_seed(self._requests)
            prompt = torch.randint(0, SHAPE["vocab_size"], (prompt_tokens,), generator=generator).tolist()
            params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
            self.scheduler.add_request(TokenizedRequest(f"r{self._requests}", prompt, params))

    def prefill(self) -> None:
        """Step until every request decodes."""
        while self.scheduler.waiting or any(not req.is_prefill_done for req in self.scheduler.running):
            self.step()

    def step(self) -> None:
        self.scheduler.step()
        while self._ours.poll(0):
            self._ours.recv()

    def finish(self) -> None:
        """Abort what runs."""
        for req in list(self.scheduler.running):
            self.scheduler.abort_request(req.rid)
        self.step()
