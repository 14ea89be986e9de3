"""Checks of :mod:`sgl_aspects.engines.sglang.conformance` in a process where SGLang chose its platform."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

#: SGLang's capabilities with requirements that only SGLang has, and the requirement.
_NEEDED: dict[str, Callable[[], Any]] = {
    "supports_triton": lambda: importlib.import_module("triton.language"),
    "hicache_device_kernels": lambda: importlib.import_module("sgl_kernel.kvcacheio"),
    "supports_pynccl": lambda: importlib.import_module(
        "sglang.srt.distributed.device_communicators.pynccl_wrapper"
    ).NCCLLibrary(),
}
_POOLS = {"mha": "MHATokenToKVPool", "mla": "MLATokenToKVPool", "dsa": "DSATokenToKVPool"}


def identity() -> dict[str, Any]:
    import sglang

    platform = _platform()
    return {
        "class": type(platform).__name__,
        "out_of_tree": platform.is_out_of_tree(),
        "device_name": platform.device_name,
        "device_type": platform.device_type,
        "version": sglang.__version__,
    }


def questions() -> dict[str, Any]:
    import torch

    platform = _platform()
    device = (torch.device, str)
    expected: dict[str, tuple[Callable[[], Any], Any]] = {
        "get_device(None)": (lambda: platform.get_device(None), device),
        "get_device(0)": (lambda: platform.get_device(0), device),
        "get_device_name": (platform.get_device_name, str),
        "get_device_total_memory": (platform.get_device_total_memory, int),
        "get_current_memory_usage": (platform.get_current_memory_usage, (int, float)),
        "get_available_memory": (platform.get_available_memory, tuple),
        "get_device_capability": (platform.get_device_capability, (tuple, type(None))),
        "get_cpu_architecture": (platform.get_cpu_architecture, object),
        "is_pin_memory_available": (lambda: platform.is_pin_memory_available(device=None), bool),
        "get_torch_distributed_backend_str": (platform.get_torch_distributed_backend_str, str),
        "get_group_coordinator_device": (lambda: platform.get_group_coordinator_device(0), device),
        "inference_mode": (platform.inference_mode, AbstractContextManager),
        "seed_everything(None)": (lambda: platform.seed_everything(None), type(None)),
        "empty_cache": (platform.empty_cache, type(None)),
        "synchronize": (platform.synchronize, type(None)),
        "reindex_device_id": (lambda: platform.reindex_device_id(0), AbstractContextManager),
        "get_default_attention_backend": (platform.get_default_attention_backend, str),
        "get_dispatch_key_name": (platform.get_dispatch_key_name, str),
        "get_compile_backend": (platform.get_compile_backend, str),
        "get_torch_profiler_activity": (platform.get_torch_profiler_activity, object),
        "get_torch_profiler_activity_str": (platform.get_torch_profiler_activity_str, str),
        "supports_speculative_algorithm": (lambda: platform.supports_speculative_algorithm("EAGLE"), bool),
        "get_speculative_worker_cls": (
            lambda: platform.get_speculative_worker_cls("EAGLE"),
            (type, type(None)),
        ),
        "get_speculative_graph_runner_cls": (
            lambda: platform.get_speculative_graph_runner_cls("EAGLE", "draft_decode"),
            (type, type(None)),
        ),
        "get_quantization_config": (lambda: platform.get_quantization_config("fp8"), (type, type(None))),
        "get_paged_allocator_cls": (platform.get_paged_allocator_cls, (type, type(None))),
        "get_graph_runner_cls": (platform.get_graph_runner_cls, (type, type(None))),
        "get_piecewise_backend_cls": (platform.get_piecewise_backend_cls, (type, type(None))),
        "get_communicator_class": (platform.get_communicator_class, (type, type(None))),
    }
    return {name: _answer(question, kind) for name, (question, kind) in expected.items()}


def capabilities() -> dict[str, str | None]:
    """Return for each declared one None, or why its requirement is not met."""
    declared = _platform().capabilities
    found: dict[str, str | None] = {}
    for name, needed in _NEEDED.items():
        if getattr(declared, name, False):
            try:
                needed()
                found[name] = None
            except Exception as error:  # noqa: BLE001  # reported as the check's result
                found[name] = f"{type(error).__name__}: {error}"
    return found


def pools() -> dict[str, tuple[bool, str]]:
    ours = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    found = {}
    for kind, base in _POOLS.items():
        pool = _platform().get_kv_pool_cls(kind=kind)
        right = pool is None or issubclass(pool, getattr(ours, base))
        found[kind] = right, "SGLang's own" if pool is None else pool.__name__
    return found


def greedy(folder: str, prompts: str, count: str, dtype: str) -> list[list[int]]:
    from sglang import Engine

    graphs = getattr(_platform().capabilities, "graph_capture", False)
    engine = Engine(
        model_path=folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        sampling_backend="pytorch",
        max_total_tokens=2048,
        max_running_requests=8,
        context_length=256,
        disable_cuda_graph=not graphs,
        log_level="error",
    )
    try:
        params = {"max_new_tokens": int(count), "temperature": 0, "ignore_eos": True}
        answers = engine.generate(input_ids=json.loads(Path(prompts).read_text()), sampling_params=params)
        return [answer["output_ids"] for answer in answers]
    finally:
        engine.shutdown()


def multimodal() -> dict[str, Any]:
    import torch

    try:
        platforms: Any = importlib.import_module("sglang.multimodal_gen.runtime.platforms")
    except ImportError as error:
        return {"missing": f"SGLang's multimodal engine cannot be imported here: {error}"}
    platform = platforms.current_platform
    platforms.initialize_current_platform()
    device = platform.get_local_torch_device()
    expected: dict[str, tuple[Callable[[], Any], Any]] = {
        "is_out_of_tree": (lambda: platform.is_out_of_tree() or None, bool),
        "get_local_torch_device": (lambda: device, torch.device),
        "get_device": (lambda: platform.get_device(0), torch.device),
        "tensor_on_device": (lambda: platform.tensor_on_device(torch.zeros(1, device=device)) or None, bool),
        "get_device_name": (platform.get_device_name, str),
        "get_device_total_memory": (platform.get_device_total_memory, int),
        "get_current_memory_usage": (platform.get_current_memory_usage, (int, float)),
        "get_available_gpu_memory": (platform.get_available_gpu_memory, float),
        "get_device_capability": (platform.get_device_capability, (tuple, type(None))),
        "has_device_capability": (lambda: platform.has_device_capability(10), bool),
        "get_torch_distributed_backend_str": (platform.get_torch_distributed_backend_str, str),
        "get_all_to_all_communicator_cls": (platform.get_all_to_all_communicator_cls, str),
        "get_torch_library_dispatch_key": (platform.get_torch_library_dispatch_key, str),
        "get_dispatch_key_name": (platform.get_dispatch_key_name, str),
        "get_compile_backend": (platform.get_compile_backend, str),
        "inference_mode": (platform.inference_mode, AbstractContextManager),
        "seed_everything(None)": (lambda: platform.seed_everything(None), type(None)),
        "synchronize": (platform.synchronize, type(None)),
        "empty_cache": (platform.empty_cache, type(None)),
        "is_amp_supported": (platform.is_amp_supported, bool),
        "is_float64_supported": (platform.is_float64_supported, bool),
        "device_shares_host_memory": (platform.device_shares_host_memory, bool),
        "optimize_vae": (lambda: platform.optimize_vae(torch.nn.Linear(1, 1)), torch.nn.Module),
        "get_attn_backend_cls_str": (
            lambda: platform.get_attn_backend_cls_str(None, 64, torch.float32) or None,
            str,
        ),
        "get_attn_backend_cls_str(TORCH_SDPA)": (
            lambda: platform.get_attn_backend_cls_str(
                platforms.AttentionBackendEnum.TORCH_SDPA, 64, torch.float32
            ),
            str,
        ),
    }
    return {name: _answer(question, kind) for name, (question, kind) in expected.items()}


def _platform() -> Any:
    return importlib.import_module("sglang.srt.platforms").current_platform


def _answer(question: Callable[[], Any], kind: Any) -> dict[str, Any]:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    expected = " or ".join(each.__name__ for each in kinds)
    try:
        found = question()
    except Exception as error:  # noqa: BLE001  # reported as the check's result
        return {"right": False, "expected": expected, "found": f"{type(error).__name__}: {error}"}
    return {"right": isinstance(found, kind), "expected": expected, "found": repr(found)}


_ANSWERS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (identity, questions, capabilities, pools, greedy, multimodal)
}

if __name__ == "__main__":
    answer = _ANSWERS[sys.argv[1]](*sys.argv[2:])
    print(f"\n{json.dumps(answer)}", flush=True)
