"""The embedded engine: small, readable, and real.

The caller's process:
    engine.py             Engine: generate, stream, submit, abort, shutdown
    request_manager.py, request_handle.py   each request from prompt to text, and what its caller holds of it
    scheduler_link.py, rank_processes.py    the spawned scheduler processes and the pipe to them
    tokenizer.py, text_stream.py   text to tokens, chat templates; tokens to text as they come
The scheduler's process:
    scheduler_process.py  its entry point
    scheduler.py, batch.py   continuous batching: which tokens the model sees in each step
    kv_cache/             pages, page table, pools by kind of attention
    model_runner.py, forward_batch.py               one step on the device
    logit_adjuster.py, grammar.py, sampler.py, logprobs.py   from logits to tokens
    rank_links.py, communicator.py   what several ranks tell each other
    models/, ops/, attention/      the model, written on operators
Both:
    server_args.py, sampling_params.py, checks.py, messages.py, loader/ (what a checkpoint says of itself)

Importing this package imports none of that; the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_aspects.runtime.engine import Engine
    from sgl_aspects.runtime.request_handle import GenerationResult, RequestHandle, StreamChunk
    from sgl_aspects.runtime.sampling_params import SamplingParams
    from sgl_aspects.runtime.server_args import ServerArgs

_HOMES = {
    "Engine": "engine",
    "GenerationResult": "request_handle",
    "RequestHandle": "request_handle",
    "SamplingParams": "sampling_params",
    "ServerArgs": "server_args",
    "StreamChunk": "request_handle",
}

__all__ = ["Engine", "GenerationResult", "RequestHandle", "SamplingParams", "ServerArgs", "StreamChunk"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
