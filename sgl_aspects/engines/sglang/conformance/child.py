"""Checks of :mod:`sgl_aspects.engines.sglang.conformance` in a process where SGLang chose its platform."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: SGLang's capabilities with requirements that only SGLang has, and the requirement.
_NEEDED: dict[str, Callable[[], Any]] = {
    "supports_triton": lambda: importlib.import_module("triton.language"),
    "hicache_device_kernels": lambda: importlib.import_module("sgl_kernel.kvcacheio"),
    "supports_pynccl": lambda: importlib.import_module(
        "sglang.srt.distributed.device_communicators.pynccl_wrapper"
    ).NCCLLibrary(),
}
_MEMORY_POOL = "sglang.srt.mem_cache.memory_pool"
_TOKENS, _PAGE_SIZE = 64, 4
#: The sizes of a pool's row.
_ROWS: dict[str, dict[str, int]] = {
    "mha": {"head_num": 2, "head_dim": 8},
    "mla": {"kv_lora_rank": 12, "qk_rope_head_dim": 4},
    "dsa": {"kv_lora_rank": 12, "qk_rope_head_dim": 4, "index_head_dim": 6, "kv_cache_dim": 16},
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
            lambda: platform.get_speculative_graph_runner_cls(algorithm="EAGLE", phase="draft_decode"),
            (type, type(None)),
        ),
        **{
            f"get_quantization_config({name})": (partial(_quantization, name), (type, type(None)))
            for name in ("fp8", *getattr(platform, "platform", platform).supported_quantization)
        },
        "get_paged_allocator_cls": (platform.get_paged_allocator_cls, (type, type(None))),
        "get_graph_runner_cls": (platform.get_graph_runner_cls, (type, type(None))),
        "get_piecewise_backend_cls": (platform.get_piecewise_backend_cls, (type, type(None))),
        "get_communicator_class": (platform.get_communicator_class, (type, type(None))),
    }
    if hasattr(platform, "get_full_graph_backend_cls"):  # from 0.5.23
        expected |= {
            "get_full_graph_backend_cls": (platform.get_full_graph_backend_cls, (type, type(None))),
            "support_mamba_cache_extra_buffer": (platform.support_mamba_cache_extra_buffer, bool),
        }
    return {name: _answer(question, kind) for name, (question, kind) in expected.items()}


def _quantization(name: str) -> Any:
    """Return the class that a model loads with; None for SGLang's own."""
    found = _platform().get_quantization_config(name)
    base = importlib.import_module("sglang.srt.layers.quantization.base_config").QuantizationConfig
    if found is not None and not issubclass(found, base):
        raise TypeError(f"{found.__name__} is not derived from QuantizationConfig")
    return found


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
    """Write and read a pool of each kind, made with SGLang's arguments: whether that is right, its name."""
    return {kind: _tried(kind) for kind in _POOLS}


def _tried(kind: str) -> tuple[bool, str]:
    import torch

    try:
        pool_class = _platform().get_kv_pool_cls(kind=kind)
        if pool_class is None:
            return True, "SGLang's own"
        if not issubclass(pool_class, getattr(importlib.import_module(_MEMORY_POOL), _POOLS[kind])):
            return False, f"{pool_class.__name__}, which is not derived from {_POOLS[kind]}"
        if kind == "dsa" and not hasattr(pool_class, "vendors"):  # its own needs kernels of SGLang's
            return True, pool_class.__name__
        pool = _made(pool_class, kind)
        slots = torch.tensor([_PAGE_SIZE, 2 * _PAGE_SIZE - 1, 9], device=pool.device)
        width = _ROWS[kind].get("head_dim") or sum(_ROWS[kind].values())
        key = torch.randn(3, _ROWS[kind].get("head_num", 1), width, device=pool.device)
        value = torch.randn_like(key) if kind == "mha" else key[..., : _ROWS[kind]["kv_lora_rank"]]
        pool.set_kv_buffer(SimpleNamespace(layer_id=1), slots, key.clone(), value.clone())
        read = pool.get_key_buffer(1)[slots], pool.get_value_buffer(1)[slots]
        right = torch.equal(read[0], key) and torch.equal(read[1], value)
        return right, pool_class.__name__ if right else f"{pool_class.__name__}: others than were written"
    except Exception as error:  # noqa: BLE001  # reported as the check's result
        return False, f"{type(error).__name__}: {error}"


def _made(pool_class: Any, kind: str) -> Any:
    sizes = {"size": _TOKENS, "page_size": _PAGE_SIZE, "layer_num": 2, "start_layer": 0, "end_layer": 1}
    dtype = importlib.import_module("torch").float32
    device = _platform().device_type
    return pool_class(**sizes, **_ROWS[kind], dtype=dtype, device=device, enable_memory_saver=False)


def allocator() -> dict[str, str]:
    """Three requests are prefilled, decode and end. Return what is wrong, or the allocator's name."""
    import torch

    found = _platform().get_paged_allocator_cls()
    if found is None:
        return {"name": "SGLang's own"}
    memory_pool = importlib.import_module(_MEMORY_POOL)
    pool = _made(_platform().get_kv_pool_cls(kind="mha") or memory_pool.MHATokenToKVPool, "mha")
    given = {"dtype": pool.dtype, "device": pool.device, "kvcache": pool, "need_sort": False}
    made = found(_TOKENS, page_size=_PAGE_SIZE, **given)
    free = made.available_size()
    lengths = torch.tensor([3, 9, 4])
    before = torch.zeros_like(lengths)
    nothing = torch.full_like(lengths, -1)
    there = [each.to(pool.device) for each in (before, lengths, nothing)]
    new = made.alloc_extend(there[0], before, there[1], lengths, there[2], int(lengths.sum()))
    owned = [part.tolist() for part in new.cpu().split(lengths.tolist())]
    for _ in range(_PAGE_SIZE + 1):
        lengths = lengths + 1
        last = torch.tensor([slots[-1] for slots in owned], device=pool.device)
        new = made.alloc_decode(lengths.to(pool.device), lengths, last)
        for slots, slot in zip(owned, new.tolist()):
            slots.append(slot)
    used = [slot for slots in owned for slot in slots]
    if len(set(used)) < len(used) or min(used) < _PAGE_SIZE:
        return {"wrong": f"slots that others have, or the padding: {sorted(used)}"}
    for slots in owned:
        pages = [slots[at : at + _PAGE_SIZE] for at in range(0, len(slots), _PAGE_SIZE)]
        if any(page != list(range(page[0], page[0] + len(page))) or page[0] % _PAGE_SIZE for page in pages):
            return {"wrong": f"slots of a request that do not fill pages: {slots}"}
    made.free_group_begin()
    for slots in owned:
        made.free(torch.tensor(slots, device=pool.device))
    made.free_group_end()
    if made.available_size() != free:
        return {"wrong": f"{made.available_size()} tokens free at the end, {free} at first"}
    return {"name": found.__name__}


def greedy(folder: str, prompts: str, count: str, dtype: str) -> dict[str, Any]:
    """Return the tokens, and the attention backend that computed them."""
    from sglang import Engine

    graphs = getattr(_platform().capabilities, "graph_capture", False)
    # SGLang uses a platform's allocator where pages are larger than one token.
    pages = {} if _platform().get_paged_allocator_cls() is None else {"page_size": 16}
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
        **pages,
    )
    try:
        params = {"max_new_tokens": int(count), "temperature": 0, "ignore_eos": True}
        answers = engine.generate(input_ids=json.loads(Path(prompts).read_text()), sampling_params=params)
        args: Any = engine.server_args
        values = args.resolved_dict() if hasattr(args, "resolved_dict") else vars(args)
        tokens = [answer["output_ids"] for answer in answers]
        return {"tokens": tokens, "attention_backend": values["attention_backend"]}
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
    function.__name__: function
    for function in (identity, questions, capabilities, pools, allocator, greedy, multimodal)
}

if __name__ == "__main__":
    answer = _ANSWERS[sys.argv[1]](*sys.argv[2:])
    print(f"\n{json.dumps(answer)}", flush=True)
