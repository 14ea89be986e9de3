"""The embedded runtime: which of its functions plays which role."""

from __future__ import annotations

from typing import Any

from sgl_aspects.engines.base import Engine, Role, returned
from sgl_aspects.engines.embedded import details

_MANAGER = "sgl_aspects.runtime.frontend.manager:RequestManager"
_SCHEDULER = "sgl_aspects.runtime.scheduling.scheduler:Scheduler"
_GRAPHS = "sgl_aspects.runtime.execution.graph_runner:GraphRunner"
_RUNNER = "sgl_aspects.runtime.execution.model_runner:ModelRunner"


def _kv_usage(scheduler: Any) -> float | None:
    """Return the fraction of the KV cache that is in use, from 0 to 1."""
    cache = scheduler.kv_cache
    total = cache.total_size
    return 1.0 - cache.available_size() / total if total else None


def _prefills(batch: Any) -> list[tuple[Any, int, bool]]:
    """Return the requests that a batch prefills: tokens of each in it, and whether it is the last chunk."""
    found = []
    for req, tokens in zip(batch.reqs, batch.num_new_tokens):
        left = req.prefill_tokens_left
        if left:
            found.append((req, tokens, left <= tokens))
    return found


def _in_flight(manager: Any) -> dict[str, Any]:
    """Return the open requests, by id; other threads add and remove some."""
    return {rid: handle.request for rid, handle in dict(manager._under_way).items()}


def _messages(request: Any) -> list[tuple[str, str]] | None:
    """Return the prompt by roles; None if it comes as token ids."""
    if isinstance(request.prompt, str):
        return [("user", request.prompt)]
    if not request.is_chat:
        return None
    return [(str(message.get("role")), _text(message.get("content"))) for message in request.prompt]


def _text(content: Any) -> str:
    """Return a message's text, whose content is a text or a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


EMBEDDED = Engine(
    name="embedded",
    provider_name="sgl_aspects",
    roles={
        # In the process of the caller.
        "receive_request": Role((f"{_MANAGER}.receive_request",), ("_", "request"), required=True),
        "tokenize_request": Role((f"{_MANAGER}.tokenize_request",), ("_", "request:handle")),
        "send_request": Role((f"{_MANAGER}.send_request",), ("_", "tokenized:handle"), required=True),
        "detokenize": Role((f"{_MANAGER}.detokenize",), ("_", "state:handle")),
        "finish_request": Role(
            (f"{_MANAGER}.finish_request",),
            ("_", "state:handle", "finish_reason", "error"),
            required=True,
        ),
        # In the scheduler's process.
        "add_request": Role((f"{_SCHEDULER}.add_request",), ("scheduler:self", "message"), required=True),
        "compile_grammar": Role(
            (f"{_SCHEDULER}.compile_grammar",),
            ("_", "req"),
            reads={"kind": lambda *_: "json", "waits": returned},
        ),
        "grammar_ready": Role((f"{_SCHEDULER}.accept_request",), reads={"reqs": lambda args, *_: [args[1]]}),
        "end_scheduled_request": Role(
            (f"{_SCHEDULER}.finish_request",), ("_", "req", "finish_reason"), required=True
        ),
        "receive_messages": Role((f"{_SCHEDULER}.recv_requests",), ("scheduler:self",)),
        "schedule": Role((f"{_SCHEDULER}.schedule",), required=True),
        "run_batch": Role((f"{_SCHEDULER}.run_batch",), ("_", "batch"), required=True),
        "process_batch_result": Role(
            (f"{_SCHEDULER}.process_batch_result",), ("scheduler:self", "batch", "result"), required=True
        ),
        "update_weights": Role((f"{_SCHEDULER}.update_weights",)),
        "retract": Role((f"{_SCHEDULER}.retract_request",), ("_", "req")),
        **details.ROLES,
        "load_model": Role((f"{_RUNNER}.load_model",)),
        "forward": Role((f"{_RUNNER}.forward",), ("model_runner:self", "batch"), required=True),
        "graph_capture": Role((f"{_GRAPHS}.capture",)),
        "graph_launch": Role(("sgl_aspects.platforms.graphs:DeviceGraph+.replay",)),
        "sample": Role((f"{_RUNNER}.sample",)),
    },
    attributes={
        "request.rids": lambda request: (request.rid,),
        "request.headers": "headers",
        "request.group": "group",
        "request.messages": _messages,
        "request.operation": lambda request: "chat" if request.is_chat else "text_completion",
        "request.stream": "stream",
        "request.max_tokens": "sampling_params.max_new_tokens",
        "request.temperature": "sampling_params.temperature",
        "request.top_p": "sampling_params.top_p",
        "request.top_k": "sampling_params.top_k",
        "request.seed": "sampling_params.seed",
        "request.frequency_penalty": lambda request: request.sampling_params.frequency_penalty or None,
        "request.presence_penalty": lambda request: request.sampling_params.presence_penalty or None,
        "request.stop_sequences": "sampling_params.stop",
        "request.choice_count": lambda request: request.sampling_params.n if request.group else None,
        "manager.model": "model",
        "manager.in_flight": _in_flight,
        "tokenized.rid": "rid",
        "tokenized.count": lambda tokens: len(tokens) if isinstance(tokens, list) else None,
        "state.rid": "rid",
        "state.prompt_tokens": "prompt_tokens",
        "state.cached_tokens": "cached_tokens",
        "state.output_tokens": lambda state: len(state.output_ids),
        "state.text": "text",
        "state.first_token_time_ns": "first_token_time_ns",
        "message.rid": "rid",
        "req.rid": "rid",
        "req.output_tokens": lambda req: len(req.output_ids),
        "batch.step_id": "step_id",
        "batch.mode": "forward_mode",
        "mode.name": "_value_",
        "batch.reqs": "reqs",
        "batch.num_tokens": "num_tokens",
        "batch.prefills": _prefills,
        "scheduler.waiting": lambda scheduler: len(scheduler.waiting),
        "scheduler.running": lambda scheduler: len(scheduler.running),
        "scheduler.is_idle": lambda scheduler: not scheduler.has_work,
        "scheduler.kv_usage": _kv_usage,
        "scheduler.is_follower": lambda scheduler: scheduler.ranks.rank > 0,
        "model_runner.platform": "platform",
        "model_runner.model": "model",
    },
)
