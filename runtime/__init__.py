"""The embedded engine: small, readable, and real.

In the order in which it is best read:

Both processes
    server_args.py, sampling_params.py, checks.py   what a user may choose of an engine, and of a request
    messages.py                                     what travels between the processes
    loader/                                         what a checkpoint says of itself
The caller's process
    engine.py                                       Engine: generate, stream, submit, abort, shutdown
    request_manager.py, request_handle.py           each request from prompt to text; what its caller holds
    tokenizer.py, text_stream.py                    text to tokens, by a chat template too, and back
    scheduler_link.py, rank_processes.py            the pipe to the scheduler; the processes at its other end
The scheduler's process
    scheduler_process.py                            its entry point
    scheduler.py, batch.py                          continuous batching: which tokens the model sees in a step
    kv_cache/                                       pages, page table, prefixes, pools by kind of attention
    model_runner.py, forward_batch.py               one step on the device
    graph_runner.py, piecewise.py                   the same as a graph, or compiled
    models/, ops/, attention/                       the model, written on operators
    logit_adjuster.py, grammar.py, sampler.py       from logits to tokens
    sampled_tokens.py, logprobs.py                  what a step gives its requests
    rank_links.py, communicator.py                  what several ranks tell each other

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
