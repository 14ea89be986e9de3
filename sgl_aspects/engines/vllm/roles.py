"""vLLM 0.32 (its V1 engine, on GPUs and on the CPU): which of its functions plays which role.

Processes: API servers, an engine core, workers; the first tokenize before there is a request, and process
outputs by message; the last run the forward passes. A batch is one message from the engine core to all of its
workers (``SchedulerOutput``), and prompts and decodes are mixed in it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from sgl_aspects.engines.base import CallReader, Engine, Outcome, Role, parameter, returned
from sgl_aspects.engines.device import platform_of
from sgl_aspects.engines.vllm import batch, disaggregation, processes

_ENGINE = "vllm.v1.engine"
_LLM = f"{_ENGINE}.async_llm:AsyncLLM"
_OUTPUTS = f"{_ENGINE}.output_processor:OutputProcessor"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_CORE = f"{_ENGINE}.core:EngineCore"
_ADAPTERS = "vllm.lora.worker_manager:WorkerLoRAManager"
_KV_CACHE = "vllm.v1.core.kv_cache_manager:KVCacheManager"
#: Offloading to the host's memory, in each worker: native, or the simple connector's.
_TIERS = "vllm.v1.kv_offload.cpu.gpu_worker:CPUOffloadingWorker"
_COPIES = "vllm.v1.simple_kv_offload.*:*Backend.launch_copy"
_EXECUTOR = "vllm.v1.executor.abstract:Executor+"
_BEAMS = (
    "vllm.entrypoints.generate.beam_search.*:BeamSearch*Mixin.beam_search",
    "vllm.entrypoints.openai.**:OpenAIServing.beam_search",
)
# Two classes have that name, the newer in a package `gpu`; the one for the CPU is a subclass of either.
_RUNNER = "vllm.v1.worker.**:GPUModelRunner"


# -- a request in the API server -------------------------------------------------------------------------


def _sampling(name: str) -> Any:
    def read(request: Any) -> Any:
        return getattr(request.sampling_params, name, None)

    return read


def _answers(request: Any) -> int:
    """Return the requested number of answers; a request for embeddings has no sampling parameters."""
    return getattr(request.sampling_params, "n", 1) or 1


_search_call = Role((), ("self", "_", "rid:request_id", "params", "lora:lora_request"))
_program_search = Role((), ("self", "prompts", "params", "lora:lora_request"))


def _search(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> Any:
    """Return a beam search as a request: the engine gets one for each beam and token. A program's has a list
    of prompts and no id.
    """
    if hasattr(args[0], "engine_client"):
        prompts, role = 1, _search_call
        rid = role.reader("rid")(args, kwargs)
    else:
        role, rid = _program_search, f"beams-{args[0].request_counter.counter}"
        prompts = len(role.reader("prompts")(args, kwargs))
    params, lora = role.reader("params")(args, kwargs), role.reader("lora")(args, kwargs)
    return SimpleNamespace(
        request_id=rid,
        external_req_id=rid,
        sampling_params=params,
        pooling_params=None,
        lora_request=lora,
        prompts=prompts,
    )


def _received_ns(request: Any) -> int:
    """Return when the front end got it, on the monotonic clock; vLLM notes it on the wall clock."""
    return time.monotonic_ns() - max(0, int((time.time() - request.arrival_time) * 1e9))


def _choice_count(request: Any) -> int | None:
    count = _answers(request)
    return count if count > 1 else None


def _answer_rids(request: Any) -> tuple[str, ...] | None:
    """Return the ids; for n > 1 each answer is a request of its own in the engine."""
    count = _answers(request)
    return tuple(f"{index}_{request.request_id}" for index in range(count)) if count > 1 else None


def _response_id(request: Any) -> str | None:
    """Return the client's id: before vLLM adds the prompt's number to a completion's, and random letters;
    a front end in Rust adds the letters only.
    """
    given = getattr(request, "external_req_id", None)
    if not given:
        return re.sub("-[0-9a-f]{8}$", "", request.request_id)
    return re.sub(r"(?<=^cmpl-)(.+)-\d+$", r"\1", given)


def _streams(request: Any) -> bool | None:
    if hasattr(request, "status"):
        return None  # the engine core's: a front end in Rust asks for each token in any case
    kind = getattr(request.sampling_params or request.pooling_params, "output_kind", None)
    return getattr(kind, "name", "FINAL_ONLY") != "FINAL_ONLY"


def _top_k(request: Any) -> int | None:
    top_k = _sampling("top_k")(request)
    return top_k if top_k and top_k > 0 else None  # 0 and -1: no limit


def _output_type(request: Any) -> str | None:
    wanted = _sampling("structured_outputs")(request)
    is_json = wanted is not None and (wanted.json is not None or wanted.json_object)
    return "json" if is_json else None


def _tokenized_count(prompt: Any) -> int | None:
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    return None if ids is None else len(ids)


class _Outputs(NamedTuple):
    """A processed message of the engine.

    ``stopped``: requests whose text has a stop string, which the engine does not see.
    ``going_on``: those that have not ended: a prompt that comes in parts is answered after each.
    """

    outputs: Sequence[Any]
    stopped: Iterable[str]
    going_on: Container[str]

    def each(self) -> Iterator[tuple[str, str | None]]:
        for output in self.outputs:
            yield output.request_id, self._reason(output)

    def new(self) -> Iterator[tuple[str, str | None, int, int | None, int | None]]:
        """Yield of each request: why it ended, new tokens, and with its prompt also all and cached ones."""
        for output in self.outputs:
            prefill = output.prefill_stats
            prompt, cached = (
                (prefill.num_prompt_tokens, prefill.num_cached_tokens)
                if prefill is not None
                else (None, None)
            )
            yield output.request_id, self._reason(output), len(output.new_token_ids), prompt, cached

    def _reason(self, output: Any) -> str | None:
        if output.finish_reason is not None:
            return None if output.request_id in self.going_on else str(output.finish_reason)
        return "stop" if output.request_id in self.stopped else None


def _outputs(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> _Outputs:
    outputs = args[1] if len(args) > 1 else kwargs.get("engine_core_outputs", ())
    going_on = () if result is None else args[0].request_states
    return _Outputs(outputs, getattr(result, "reqs_to_abort", ()), going_on)


# -- a request in the engine core --------------------------------------------------------------------------

_waiting = parameter(1, "request")


def _waits_for_grammar(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> bool:
    request = _waiting(args, kwargs)
    is_blocked = request.status.name == "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"
    return is_blocked and not request.structured_output_request.is_grammar_ready


def _grammar_kind(request: Any) -> str:
    return str(request.structured_output_request.structured_output_key[0].name.lower())


_is_store = parameter(3, "is_store")
_copied = parameter(1, "src_blocks", len)


def _moved_bytes(position: int, name: str, *, stores: bool) -> CallReader:
    """Return a reader of the bytes of the device's blocks that an offloading moves, of each group of layers.

    ``position``, ``name``: the parameter that has them. The simple connector has one function for both ways.
    """
    of_device = parameter(position, name)

    def read(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> int:
        worker = args[0]
        if hasattr(worker, "launch_copy"):
            is_other = bool(_is_store(args, kwargs)) is not stores
            return 0 if is_other else _copied(args, kwargs) * int(worker._store_params.bpb.sum())
        sizes, groups = of_device(args, kwargs).group_sizes, worker._load_handler.layer_refs_per_group
        return sum(size * sum(ref.page_size_bytes for ref in refs) for size, refs in zip(sizes, groups))

    return read


VLLM = Engine(
    name="vllm",
    provider_name="vllm",
    roles={
        **processes.ROLES,
        # In each API server's process.
        "serve_request": Role((f"{_LLM}.generate",), ("manager:self",), required=True),
        "serve_pooling": Role((f"{_LLM}.encode",), ("manager:self",)),
        "serve_search": Role(
            _BEAMS,
            reads={
                "manager": lambda args, *_: getattr(args[0], "engine_client", None) or args[0].llm_engine,
                "request": _search,
            },
        ),
        "submit_request": Role((f"{_ENGINE}.llm_engine:LLMEngine.add_request",), ("manager:self",)),
        "submit_requests": Role(("vllm.entrypoints.**:*._render_and_add_requests",)),
        "apply_template": Role(("vllm.renderers.base:BaseRenderer+.render_messages_async",)),
        "tokenize_prompt": Role(("vllm.renderers.base:BaseRenderer.tokenize_prompt_async",)),
        # A static method; the request has its id on its exit.
        "receive_request": Role(
            (f"{_ENGINE}.input_processor:InputProcessor.assign_request_id",), ("request",), required=True
        ),
        "send_request": Role(
            (f"{_ENGINE}.core_client:AsyncMPClient+.add_request_async",), ("_", "tokenized:request")
        ),
        "receive_outputs": Role(
            (f"{_OUTPUTS}.process_outputs",), ("manager:self",), reads={"outputs": _outputs}, required=True
        ),
        "parse_output": Role(("vllm.parser.**:*Parser*.parse*",)),
        "detokenize": Role((f"{_OUTPUTS}.process_outputs",), reads={"outputs": _outputs}),
        "receive_abort": Role((f"{_OUTPUTS}.abort_requests",), reads={"aborted": returned}),
        # In each engine core's process.
        "add_request": Role(
            (f"{_SCHEDULER}.add_request",), ("scheduler:self", "message:request"), required=True
        ),
        "end_scheduled_request": Role(
            (f"{_SCHEDULER}._free_request",),
            reads={
                "req": parameter(1, "request", disaggregation.ended),
                "finish_reason": parameter(1, "request", lambda request: str(request.get_finished_reason())),
            },
        ),
        "compile_grammar": Role(
            (f"{_SCHEDULER}._enqueue_waiting_request",),
            ("_", "req:request"),
            reads={"kind": parameter(1, "request", _grammar_kind), "waits": _waits_for_grammar},
        ),
        "grammar_ready": Role(
            (
                f"{_SCHEDULER}._handle_blocked_waiting_request",
                f"{_SCHEDULER}._try_promote_blocked_waiting_request",
            ),
            reads={"reqs": lambda args, kwargs, result=None: [_waiting(args, kwargs)] if result else ()},
        ),
        "retract": Role((f"{_SCHEDULER}._preempt_request",), ("_", "req:request")),
        "schedule": Role((f"{_SCHEDULER}.schedule",), required=True),
        "run_batch": Role(
            (f"{_EXECUTOR}.execute_model",),
            ("_", "batch:scheduler_output"),
            required=True,
        ),
        "process_batch_result": Role(
            (f"{_SCHEDULER}.update_from_output",),
            ("scheduler:self", "batch:scheduler_output", "result:model_runner_output"),
            reads={"drafts": batch.verified},
            required=True,
        ),
        # In each worker's process, or in the engine core's where there is one device.
        "forward": Role((f"{_RUNNER}.execute_model",), ("model_runner:self", "batch:scheduler_output")),
        "sample": Role((f"{_RUNNER}.sample_tokens",)),
        "draft": Role((f"{_RUNNER}.propose_draft_token_ids",)),
        # PyTorch's, of any device: vLLM calls it in a place for each kind of graph.
        "graph_launch": Role(("torch*.*.graphs:*Graph.replay",), package="vllm"),
        "run_encoder": Role(("vllm.v1.worker.encoder_cudagraph:EncoderCudaGraphManager.execute",)),
        "graph_capture": Role((f"{_RUNNER}.capture_model",)),
        "load_model": Role(("vllm.v1.worker.**:*PUModelRunner.load_model",)),
        "kv_init": Role((f"{_RUNNER}.initialize_kv_cache",)),
        "start_engine": Role((f"{_CORE}.__init__",)),
        "load_adapter": Role(
            (f"{_ADAPTERS}._load_adapter",),
            reads={"adapter": parameter(1, "lora_request", lambda request: request.lora_name)},
        ),
        "flush_cache": Role((f"{_CORE}.reset_prefix_cache",)),
        "update_weights_by_call": Role(
            (f"{_CORE}.collective_rpc",),
            reads={"applies": parameter(1, "method", lambda method: "weight" in str(method))},
        ),
        "pause": Role((f"{_CORE}+.pause_scheduler",)),
        "resume": Role((f"{_CORE}+.resume_scheduler",)),
        "sleep": Role((f"{_CORE}.sleep",)),
        "wake_up": Role((f"{_CORE}.wake_up",)),
        # In detail.
        "cache_match": Role(
            (f"{_KV_CACHE}.get_computed_blocks",),
            reads={
                "tokens": parameter(1, "request", lambda request: request.num_tokens),
                "hit_tokens": lambda args, kwargs, result=None: result[1] if result else None,
            },
        ),
        "cache_load": Role(
            (f"{_TIERS}.submit_load", _COPIES), reads={"bytes": _moved_bytes(3, "dst_spec", stores=False)}
        ),
        "cache_write_back": Role(
            (f"{_TIERS}.submit_store", _COPIES), reads={"bytes": _moved_bytes(2, "src_spec", stores=True)}
        ),
        "kv_alloc": Role((f"{_KV_CACHE}.allocate_slots",), ("_", "_", "tokens:num_new_tokens")),
        "kv_free": Role(
            (f"{_KV_CACHE}.free",),
            reads={"tokens": parameter(1, "request", lambda request: request.num_computed_tokens)},
        ),
    },
    attributes={
        "request.rids": lambda request: (request.request_id,),
        "request.is_single": lambda request: _answers(request) == 1,
        "request.model": lambda request: getattr(request.lora_request, "lora_name", None),
        "request.priority": lambda request: request.priority or None,
        "request.shared_key": disaggregation.shared_key,
        "request.is_first_server": disaggregation.is_first_server,
        "request.response_id": _response_id,
        "request.operation": processes.operation,
        "request.headers": "trace_headers",
        "request.output_type": _output_type,
        "request.answer_count": lambda request: getattr(request, "prompts", None) or _answers(request),
        "request.answer_rids": _answer_rids,
        "request.choice_count": _choice_count,
        "request.stream": _streams,
        "request.received_ns": _received_ns,
        **{f"request.{name}": _sampling(name) for name in ("max_tokens", "temperature", "top_p", "seed")},
        "request.top_k": _top_k,
        "request.frequency_penalty": lambda request: _sampling("frequency_penalty")(request) or None,
        "request.presence_penalty": lambda request: _sampling("presence_penalty")(request) or None,
        "request.stop_sequences": lambda request: _sampling("stop")(request) or None,
        "manager.model": "model_config.served_model_name",
        "manager.description": lambda manager: processes.description(manager.vllm_config),
        "manager.in_flight": "request_states",  # of the output processor, which has no model
        "tokenized.rid": "request_id",
        "tokenized.count": _tokenized_count,
        "outputs.each": _Outputs.each,
        "outputs.new": _Outputs.new,
        "message.rid": "request_id",
        "message.remote": processes.carried,
        "message.prompt_tokens": "num_prompt_tokens",
        "req.rid": lambda req: req if isinstance(req, str) else req.request_id,
        "req.output_tokens": "num_output_tokens",
        "batch.mode": batch.mode,
        "mode.name": "name",
        "mode.is_speculative": "is_speculative",
        "batch.reqs": batch.reqs,
        "batch.prefills": batch.scheduled.prompts,
        "batch.num_tokens": "total_num_scheduled_tokens",
        "batch.shared_id": batch.shared_id,
        "batch.summary": batch.summary,
        "scheduler.waiting": lambda scheduler: len(scheduler.waiting),
        "scheduler.running": lambda scheduler: len(scheduler.running),
        "scheduler.kv_usage": "kv_cache_manager.usage",
        "scheduler.front_end": processes.front_end,
        "model_runner.platform": lambda runner: platform_of(str(runner.device)),
        "model_runner.model": lambda runner: runner.get_model(),
    },
    own_roles={**disaggregation.ROLES, **processes.OWN_ROLES},
    observers=lambda trackers: [*batch.scheduled.observations(trackers), *processes.observers(trackers)],
    outcomes={"repetition": Outcome.STOPPED},
    repeats=batch.repeats,
    drafts=batch.drafts,
)
