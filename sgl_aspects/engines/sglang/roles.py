"""SGLang, 0.5.10 to 0.5.23 and newer: which of its functions plays which role.

Targets that moved have alternates, newest first. A missing attribute reads as None and is left out.

Three things differ from an engine with a plain loop. A scheduler without work spins, thousands of times a
second, through ``schedule``: nothing may be recorded there without a batch. With its overlapped loop the
result of a batch is processed after the next batch was launched, so that two steps are open at once. And
outputs reach the tokenizer manager for many requests in one call.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any, NamedTuple

from sgl_aspects.engines.base import Engine, Role, parameter, returned
from sgl_aspects.engines.device import platform_of
from sgl_aspects.engines.sglang import details, disaggregation, processes, speculation

_TOKENIZER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
_DETOKENIZER = "sglang.srt.managers.detokenizer_manager:DetokenizerManager"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_CHAT = "sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat"
_RESPONSES = "sglang.srt.entrypoints.openai.serving_responses:OpenAIServingResponses"
_TOKENIZERS = "transformers.tokenization_utils_base:*TokenizerBase"
_GRAMMARS = "sglang.srt.constrained.grammar_manager:GrammarManager"
_REQ = "sglang.srt.managers.schedule_batch:Req"
_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_GRAPHS = "sglang.srt.**.*graph_runner*:*GraphRunner"

# SGLang's own health checks are requests, too; their ids begin so.
_PROBE = "HEALTH_CHECK"


def _rids(request: Any) -> tuple[str, ...]:
    """Return the ids of a request: one, or one for each prompt of a batch."""
    rid = request.rid
    return tuple(rid) if isinstance(rid, list) else (rid,)


def _is_probe(request: Any) -> bool:
    return str(_rids(request)[0]).startswith(_PROBE)


def _received_ns(request: Any) -> int | None:
    """Return when the HTTP server got it, on the monotonic clock; SGLang notes it on one of its own."""
    received = request.received_time
    if not received:
        return None
    for clock in (time.monotonic, time.perf_counter):
        age = clock() - received
        if 0 <= age < 3600:
            return time.monotonic_ns() - int(age * 1e9)
    return None


def _sampling(name: str) -> Any:
    def read(request: Any) -> Any:
        parameters = request.sampling_params
        if isinstance(parameters, list):  # one for each prompt of a batch
            parameters = parameters[0] if parameters else None
        return parameters.get(name) if isinstance(parameters, dict) else getattr(parameters, name, None)

    return read


def _operation(request: Any) -> str | None:
    """Return it of a request without a server, unless it is for a text."""
    is_ranked = getattr(request, "is_cross_encoder_request", None)
    return is_ranked if is_ranked is None else "rerank" if is_ranked else "embeddings"


def _max_tokens(request: Any) -> Any:
    """Return the token limit; for an embedding SGLang sets 0 tokens, which its caller did not request."""
    tokens = _sampling("max_new_tokens")(request)
    return None if hasattr(request, "is_cross_encoder_request") and not tokens else tokens


def _adapter(request: Any) -> str | None:
    path = getattr(request, "lora_path", None)
    if isinstance(path, list):  # one for each answer; None if they differ
        path = path[0] if len({*path}) == 1 else None
    return str(path) if path else None


def _grammar_kind(req: Any) -> str | None:
    return str(req.grammar_key[0]) if getattr(req, "grammar_key", None) else None


def _stop(request: Any) -> Any:
    stop = _sampling("stop")(request)
    return [stop] if isinstance(stop, str) else stop or None


def _samples(request: Any) -> int | None:
    count = getattr(request, "parallel_sample_num", 1)
    return count if count and count > 1 else None


def _answer_rids(request: Any) -> tuple[str, ...] | None:
    """Return the ids of a batch of prompts. For n > 1 the answers get their ids one by one, later."""
    return None if request.is_single or _samples(request) else _rids(request)


def _answer_count(request: Any) -> int:
    """Return the number of answers; for n > 1 SGLang runs each prompt once more, before its samples."""
    count = _samples(request)
    return len(_rids(request)) if count is None else request.batch_size * (count + 1)


def _prompt_length(message: Any) -> int:
    """Return the prompt's tokens, which may come as embeddings."""
    return len(message.input_ids if message.input_ids is not None else message.input_embeds)


def _counts(place: tuple[Any, int]) -> tuple[int | None, int | None, int | None]:
    """Return prompt, completion and cached tokens of one request in a message to the tokenizer manager."""
    batch, index = place
    lists = [getattr(batch, f"{name}_tokens", None) for name in ("prompt", "completion", "cached")]
    prompt, completion, cached = [values[index] if values else None for values in lists]
    return prompt, completion, cached


def _tiers(place: tuple[Any, int]) -> tuple[int | None, int | None] | None:
    """Return the cached tokens that came from the host's memory and from storage."""
    batch, index = place
    details = getattr(batch, "cached_tokens_details", None)
    found = details[index] if details else None
    return None if found is None else (found.get("host"), found.get("storage"))


def _reason_text(reason: Any) -> str | None:
    """Return the reason: ``{"type": "stop", …}`` on the wire, an object with ``to_json`` in the scheduler."""
    if reason is None:
        return None
    if hasattr(reason, "to_json"):
        reason = reason.to_json()
    return str(reason.get("type", "unknown")) if isinstance(reason, dict) else str(reason)


def _reason_status(reason: Any) -> int | None:
    return int(reason.get("status_code") or 0) or None if isinstance(reason, dict) else None


def _error_status(error: Any) -> int | None:
    """Return the HTTP status by which SGLang's handlers answer it; none to a caller that is gone."""
    if isinstance(error, ValueError):
        return None if "is disconnected" in str(error) else 400
    return getattr(error, "status_code", None)


class _Mode(NamedTuple):
    name: str
    feeds_prompts: bool


@functools.cache  # called several times a step
def _mode_of(forward_mode: Any) -> _Mode:
    feeds_prompts = forward_mode.is_extend() if hasattr(forward_mode, "is_extend") else False
    return _Mode(str(getattr(forward_mode, "name", forward_mode)).lower(), feeds_prompts)


def _batch_size(batch: Any) -> int:
    size = batch.batch_size
    return int(size() if callable(size) else size)


def _num_tokens(batch: Any) -> int:
    """Return the tokens fed to the model: those of the prompts, or one per decoding request."""
    feeds_prompts = _mode_of(batch.forward_mode).feeds_prompts
    return int(batch.extend_num_tokens) if feeds_prompts and batch.extend_num_tokens else _batch_size(batch)


def _prefills(batch: Any) -> list[tuple[Any, int, None]]:
    """Return the requests that a batch prefills, with the tokens of each in it.

    Whether a prompt has further chunks is known when the result is processed.
    """
    # Last come requests that decode, with a token each.
    lengths = list(getattr(batch, "extend_lens", None) or ())
    prompts = len(lengths) - len(getattr(batch, "decoding_reqs", None) or ())
    return [(req, tokens, None) for req, tokens in zip(batch.reqs, lengths[:prompts])]


def _is_middle_chunk(req: Any) -> bool:
    """Return whether the prompt has further chunks after the one whose result is being processed."""
    return bool(getattr(req, "inflight_middle_chunks", None) or getattr(req, "is_chunked", 0))


def _kv_usage(scheduler: Any) -> float | None:
    """Return the fraction of the KV cache in use by requests, 0 to 1: pages of the prefix cache alone are
    free.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    total = allocator.size
    free = allocator.available_size() + scheduler.tree_cache.evictable_size()
    return 1.0 - free / total if total else None


def _waiting_rids(scheduler: Any) -> set[str]:
    """Return the ids of waiting requests; those that wait for their grammar run even if they are aborted."""
    grammars = getattr(getattr(scheduler, "grammar_manager", None), "grammar_queue", ())
    return {req.rid for req in (*scheduler.waiting_queue, *grammars)}


def _is_follower(scheduler: Any) -> bool:
    """Return whether it is a rank that runs the same requests as another one, which answers them."""
    channels = getattr(scheduler, "ipc_channels", scheduler)
    return channels.send_to_detokenizer.socket is None


@functools.cache  # called with each forward pass
def _platform_of(device: Any) -> Any:
    """Return the bridged platform that SGLang runs on, else that of the torch device."""
    from sgl_aspects.platforms.device_mixin import DeviceMixin

    of_sglang = getattr(sys.modules.get("sglang.srt.platforms"), "current_platform", None)
    bridged = getattr(of_sglang, "platform", None)
    return bridged if isinstance(bridged, DeviceMixin) else platform_of(str(device))


def _messages(request: Any) -> list[tuple[str, str]] | None:
    """Return the prompt as the model gets it, or each of a batch; None if it comes as token ids."""
    text = getattr(request, "text", None)
    texts = text if isinstance(text, list) else [text]
    return [("user", one) for one in texts if isinstance(one, str)] or None


def _piece(place: tuple[Any, int]) -> str | None:
    """Return the text that a message to the tokenizer manager adds to one request's answer."""
    batch, index = place
    texts = getattr(batch, "output_strs", None)
    return texts[index] if texts and isinstance(texts[index], str) else None


SGLANG = Engine(
    name="sglang",
    provider_name="sglang",
    roles={
        # In the process with the HTTP server, and in each of its tokenizer workers.
        "serve_request": Role(
            (f"{_TOKENIZER}.generate_request",),
            ("manager:self", "_", "http:request"),
            required=True,
        ),
        "receive_request": Role(
            (f"{_TOKENIZER}._init_req_state", f"{_TOKENIZER}._req_stats_init"),
            ("_", "request:obj"),
            required=True,
        ),
        # In a thread of a pool: with the tokenization of its result.
        "apply_template": Role((f"{_CHAT}._convert_to_internal_request",), ("_", "_", "http:raw_request")),
        "render_messages": Role((f"{_RESPONSES}._make_request",)),
        # Of /api/chat.
        "render_template": Role((f"{_TOKENIZERS}.apply_chat_template",), package="sglang"),
        "await_adapter": Role((f"{_TOKENIZER}._validate_and_resolve_lora",), ("_", "request:obj")),
        "tokenize_request": Role((f"{_TOKENIZER}._tokenize_one_request",), ("_", "request:obj")),
        "send_request": Role(
            (f"{_TOKENIZER}._send_one_request",), ("_", "tokenized:tokenized_obj"), required=True
        ),
        "send_requests": Role((f"{_TOKENIZER}._send_batch_request",), ("_", "tokenized:tokenized_objs")),
        "receive_outputs": Role(
            (f"{_TOKENIZER}._handle_batch_output",), ("manager:self", "outputs:recv_obj"), required=True
        ),
        "parse_output": Role(("sglang.srt.*.*_parser:*Parser.parse_*",)),
        "receive_abort": Role((f"{_TOKENIZER}._handle_abort_req",), ("_", "message:recv_obj")),
        # In the detokenizer's process.
        "detokenize": Role((f"{_DETOKENIZER}.handle_batch_token_id_out",), ("_", "outputs:recv_obj")),
        # In each scheduler's process.
        "add_request": Role(
            (f"{_SCHEDULER}.handle_generate_request",), ("scheduler:self", "message:recv_req"), required=True
        ),
        "add_embedding_request": Role(
            (f"{_SCHEDULER}.handle_embedding_request",), ("scheduler:self", "message:recv_req")
        ),
        "abort_scheduled_request": Role(
            (f"{_SCHEDULER}.abort_request",), ("scheduler:self", "message:recv_req")
        ),
        "compile_grammar": Role(
            (f"{_GRAMMARS}.process_req_with_grammar",),
            ("_", "req"),
            reads={"kind": parameter(1, "req", _grammar_kind), "waits": returned},
        ),
        "grammar_ready": Role((f"{_GRAMMARS}.get_ready_grammar_requests",), reads={"reqs": returned}),
        "reject_request": Role((f"{_REQ}.set_finish_with_abort",), ("req:self",)),
        "retract": Role((f"{_REQ}.reset_for_retract",), ("req:self",)),
        "schedule": Role((f"{_SCHEDULER}.get_next_batch_to_run",), required=True),
        "run_batch": Role((f"{_SCHEDULER}.run_batch",), ("_", "batch"), required=True),
        "process_batch_result": Role(
            (f"{_SCHEDULER}.process_batch_result",), ("scheduler:self", "batch", "result"), required=True
        ),
        # Releases the memory of a request that may have ended.
        "release_request": Role(("sglang.srt.mem_cache.common:release_kv_cache",), ("req",)),
        "forward": Role((f"{_RUNNER}.forward",), ("model_runner:self", "batch:forward_batch"), required=True),
        "sample": Role((f"{_RUNNER}.sample",)),
        # A device graph: captured at the start, replayed for batches that it fits; the others run eagerly. In
        # versions without backends, with the runner's preparation.
        "graph_launch": Role(
            (
                "sglang.srt.model_executor.runner_backend.*:*Backend.replay",
                f"{_GRAPHS}.replay",
                f"{_GRAPHS}.execute",
            ),
        ),
        **details.ROLES,
        **speculation.ROLES,
        **disaggregation.SCHEDULES,
        **processes.ROLES,
    },
    own_roles={**disaggregation.ROLES, **processes.OWN_ROLES},
    observers=lambda trackers: [*disaggregation.observers(trackers), *processes.observers(trackers)],
    attributes={
        "request.rids": _rids,
        "request.is_probe": _is_probe,
        "request.is_single": "is_single",
        "request.model": _adapter,
        "request.operation": _operation,
        "request.priority": "priority",
        "request.headers": processes.headers,
        "request.received_ns": _received_ns,
        "request.choice_count": _samples,
        "request.answer_count": _answer_count,
        "request.answer_rids": _answer_rids,
        "request.stream": "stream",
        "request.max_tokens": _max_tokens,
        "request.shared_key": disaggregation.bootstrap_room,
        "request.bootstrap_room": disaggregation.bootstrap_room,
        "manager.is_first_server": disaggregation.is_first_server,
        **{f"request.{name}": _sampling(name) for name in ("temperature", "top_p", "top_k")},
        **{f"request.{kind}_penalty": _sampling(f"{kind}_penalty") for kind in ("frequency", "presence")},
        "request.seed": _sampling("sampling_seed"),
        "request.stop_sequences": _stop,
        "request.output_type": lambda request: "json" if _sampling("json_schema")(request) else None,
        "http.path": "url.path",
        # Over gRPC, headers that can only be asked for by name.
        "http.headers": lambda http: getattr(http.headers, "_data", http.headers),
        "http.scope": "scope",
        "manager.model": "served_model_name",
        "manager.description": lambda manager: processes.description(manager.server_args),
        "manager.in_flight": lambda manager: {rid: state.obj for rid, state in manager.rid_to_state.items()},
        "tokenized.rid": "rid",
        "tokenized.count": _prompt_length,
        # Read for each request with each token: attributes not needed each time are read separately.
        "outputs.each": lambda outputs: zip(outputs.rids, outputs.finished_reasons),
        "outputs.counts": _counts,
        "outputs.tiers": _tiers,
        "outputs.text": _piece,
        "request.messages": _messages,
        "reason.text": _reason_text,
        "reason.problem": lambda reason: reason.get("err_type") if isinstance(reason, dict) else None,
        "reason.status": _reason_status,
        "error.status": _error_status,
        "message.rid": "rid",
        "message.abort_all": "abort_all",
        "message.reason": "finished_reason",
        "message.elsewhere": processes.carried,
        "message.prompt_tokens": _prompt_length,
        "message.is_probe": lambda message: str(message.rid).startswith(_PROBE),
        "rid.is_probe": lambda rid: str(rid).startswith(_PROBE),
        "req.rid": "rid",
        "req.finish_reason": lambda req: _reason_text(req.finished_reason),
        "batch.finished": lambda batch: [req for req in batch.reqs if req.finished_reason is not None],
        "req.output_tokens": speculation.output_tokens,
        "req.is_middle_chunk": _is_middle_chunk,
        "req.is_prefill_only": "is_prefill_only",
        "req.drafts": speculation.drafts,
        "batch.step_id": "forward_iter",
        "batch.mode": "forward_mode",
        "mode.name": lambda mode: _mode_of(mode).name,
        "batch.reqs": "reqs",
        "batch.prefills": _prefills,
        "batch.num_tokens": _num_tokens,
        "result.drafts": speculation.verified,
        "scheduler.waiting": lambda scheduler: len(scheduler.waiting_queue),
        "scheduler.waiting_rids": _waiting_rids,
        "scheduler.running": lambda scheduler: len(scheduler.running_batch.reqs),
        "scheduler.kv_usage": _kv_usage,
        "scheduler.is_follower": _is_follower,
        "scheduler.front_end": processes.front_end,
        "model_runner.platform": lambda runner: _platform_of(runner.device),
        "model_runner.model": "model",
    },
    drafts=speculation.DRAFTS,
)
