"""The embedded engine: small, readable, and real.

In the order in which it is best read:

Both processes
    server_args.py, sampling_params.py, checks.py   the settings of an engine, and of a request
    messages.py                                     what travels between the processes
    loader/                                         a checkpoint's configuration, tokenizer and weights
    grammar.py                                      output that a JSON schema allows
The caller's process
    engine.py                                       Engine: generate, stream, submit, abort, shutdown
    frontend/                                       each request from prompt to text
    processes/link.py, processes/ranks.py           the pipe to the scheduler; the processes at its other end
The scheduler's process
    processes/worker.py                             its entry point
    core.py                                         a request, a batch, and a batch on the device
    scheduling/                                     continuous batching: which tokens the model sees in a step
    kv_cache/                                       pages, slots, prefixes, pools by kind of attention
    execution/                                      one step on the device: eager, as a graph, or compiled
    models/, ops/, attention/, dispatch/            the model, written on operators
    sampling/                                       from logits to tokens
    communicator.py                                 collectives between ranks

Importing this package imports none of that; the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgl_aspects.runtime.engine import Engine
    from sgl_aspects.runtime.frontend.request import GenerationResult, RequestHandle, StreamChunk
    from sgl_aspects.runtime.sampling_params import SamplingParams
    from sgl_aspects.runtime.server_args import ServerArgs

_MODULES = {
    "Engine": "engine",
    "GenerationResult": "frontend.request",
    "RequestHandle": "frontend.request",
    "SamplingParams": "sampling_params",
    "ServerArgs": "server_args",
    "StreamChunk": "frontend.request",
}

__all__ = ["Engine", "GenerationResult", "RequestHandle", "SamplingParams", "ServerArgs", "StreamChunk"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
