"""The description of each server process: its model, its role among servers, its node, its rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

from sgl_aspects import env
from sgl_aspects.engines.base import CallReader, Lifecycle, Role, parameter
from sgl_aspects.engines.contract import Observation
from sgl_aspects.engines.vllm import disaggregation


def description(settings: Any) -> dict[str, Any]:
    """Return a server's description from its configuration: its model, its role among servers, its node."""
    found = {"service": settings.model_config.served_model_name, **disaggregation.description(settings)}
    if (getattr(settings.parallel_config, "nnodes", None) or 1) > 1:
        found["node_rank"] = settings.parallel_config.node_rank
    return found


def _core(settings: Any) -> dict[str, Any]:
    return _with_rank(settings, dp=_replica(settings.parallel_config))


def _worker(settings: Any) -> dict[str, Any]:
    parallel = settings.parallel_config
    stage, rank = divmod(parallel.rank, parallel.tensor_parallel_size)
    return _with_rank(settings, tp=rank, pp=stage, dp=_replica(parallel))


def _replica(parallel: Any) -> int:
    """Return the replica's number; its rank is 0 where replicas are independent of each other."""
    return int(getattr(parallel, "data_parallel_index", None) or parallel.data_parallel_rank)


def _with_rank(settings: Any, **ranks: int) -> dict[str, Any]:
    return {**description(settings), "rank": " ".join(f"{kind}{rank}" for kind, rank in ranks.items())}


def _describes(of: Callable[[Any], dict[str, Any]]) -> dict[str, CallReader]:
    return {"description": parameter(1, "vllm_config", of)}


def front_end(scheduler: Any) -> Any:
    """Return what has the attributes of the engine's client if that is not Python; else None."""
    if os.environ.get("VLLM_USE_RUST_FRONTEND") != "1":
        return None
    settings = scheduler.vllm_config
    return SimpleNamespace(vllm_config=settings, model_config=settings.model_config)


# gRPC's status codes by which the servicer refuses a request, and HTTP's.
_STATUSES = {"INVALID_ARGUMENT": 400, "NOT_FOUND": 404, "RESOURCE_EXHAUSTED": 429, "UNAVAILABLE": 503}


def _answers_rpc(name: str, path: str) -> Role:
    call = parameter(2, "context")

    def scope(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> dict[str, Any]:
        pairs = call(args, kwargs).invocation_metadata()
        return {"path": path, "headers": [(k.encode(), v.encode()) for k, v in pairs if isinstance(v, str)]}

    def status(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> int:
        return _STATUSES.get(getattr(call(args, kwargs).code(), "name", ""), 500)

    target = f"smg_grpc_servicer.vllm.servicer:VllmEngineServicer.{name}"
    return Role((target,), reads={"scope": scope, "status": status})


def _answers_line(name: str, position: int) -> Role:
    return Role(
        tuple(f"vllm.entrypoints.{place}.run_batch:{name}" for place in ("launchers", "openai")),
        reads={
            "scope": parameter(position, "request", lambda line: {"path": line.url, "headers": ()}),
            "status": lambda args, kwargs, result=None: result.response.status_code if result else 500,
        },
    )


ROLES = {
    "answer_rpc": _answers_rpc("Generate", "/generate"),
    "answer_embedding_rpc": _answers_rpc("Embed", "/embed"),
    "answer_line": _answers_line("run_request", 1),
    "refuse_line": _answers_line("make_async_error_request_output", 0),
    "describe_server": Role(("vllm.v1.engine.async_llm:AsyncLLM.__init__",), reads=_describes(description)),
    "describe_scheduler": Role(("vllm.v1.core.sched.scheduler:Scheduler.__init__",), reads=_describes(_core)),
    "describe_worker": Role(("vllm.v1.worker.**:GPUModelRunner.__init__",), reads=_describes(_worker)),
}
_PROCESSOR = "vllm.v1.engine.output_processor:OutputProcessor"
#: Of this integration's own observers.
OWN_ROLES = {
    "submit_chats": Role(("vllm.entrypoints.llm:LLM.*chat",)),
    "carry_trace": Role(("vllm.v1.engine.core_client:AsyncMPClient+._send_input",)),
    "count_times": Role((f"{_PROCESSOR}._update_stats_from_finished",), ("_", "answered:req_state")),
    "submit_scores": Role(("vllm.entrypoints.**:LLM.score", "vllm.entrypoints.**:*OfflineMixin.score")),
}
_carry_request, _carry_to = parameter(2, "request"), parameter(3, "engine")
# Among the trace headers of a request, which only vLLM's own tracing reads: the run, and the trace.
_CARRIED, _RUN = "sgl-aspects-request", "SGL_ASPECTS_TRACE_RUN"
_OPERATIONS = {"submit_chats": "chat", "submit_scores": "rerank"}
_submits: ContextVar[str] = ContextVar("sgl_aspects_submits", default="")


def operation(request: Any) -> str | None:
    """Return it where no path is known, of a front end in Rust or without a server."""
    if getattr(request, "pooling_params", None) is not None:
        return _submits.get() or "embeddings"
    return _submits.get() or ("chat" if request.request_id.startswith("chatcmpl-") else None)


def carried(request: Any) -> tuple[int, int, bool] | None:
    """Return trace id, span id and sampled flag of a request that another host's API server received."""
    run, *ids = (request.trace_headers or {}).get(_CARRIED, "").rsplit(" ", 3)
    if not ids or run == env.text(_RUN):
        return None
    trace_id, span_id, is_sampled = map(int, ids)
    return trace_id, span_id, bool(is_sampled)


def observers(trackers: Lifecycle) -> Iterable[Observation]:
    """Yield observers of a program's chats and scores, whose requests do not differ from others; and of
    requests for engine cores on other hosts: they get the trace, and their times are vLLM's own figures.
    """
    answered = trackers.engine.call_reader("count_times", "answered")

    def carry(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        parallel, request = args[0].vllm_config.parallel_config, _carry_request(args, kwargs)
        rank, current = int.from_bytes(_carry_to(args, kwargs) or b"", "little"), trackers.current_request()
        is_local = parallel.local_engines_only or rank < parallel.data_parallel_size_local
        if is_local or current is None or not hasattr(request, "trace_headers"):
            return
        told = " ".join([env.text(_RUN) or "", *(str(int(each)) for each in current)])
        request.trace_headers = {**(request.trace_headers or {}), _CARRIED: told}
        trackers.calls.sent_away(request.request_id, rank)

    def count_times(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        request = answered(args, kwargs)
        if stats := request.stats:
            times = stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts
            trackers.calls.add_times(request.request_id, times)

    yield Observation("carry_trace", carry)
    yield Observation("count_times", count_times)
    for role, name in _OPERATIONS.items():
        yield Observation(
            role,
            lambda args, kwargs, name=name: _submits.set(name),
            lambda before, result, error: _submits.reset(before),
        )
