"""Each server process: its model, its role among servers, its rank, and what happens to it as a whole.

The nodes of an engine get its requests as messages. A request's time statistics, which are pickled with it
anyway, carry its trace to the other nodes: their steps are linked to it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from sgl_aspects.engines.base import Lifecycle, Role, parameter
from sgl_aspects.engines.contract import Observation

_CONTEXT = "sglang.srt.runtime_context"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager:TokenizerManager"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_ADAPTERS = "sglang.srt.lora.lora_manager:LoRAManager"
# Fields of the time statistics; SGLang makes attributes of all fields that arrive.
_CARRIED, _HEADERS = "sgl_aspects_trace", "sgl_aspects_headers"


_server_args, _rpc = parameter(1, "server_args"), parameter(2, "grpc_context")


def description(server_args: Any) -> dict[str, Any]:
    """Return a server's description from its arguments: its model, its role among servers, its node."""
    mode = getattr(server_args, "disaggregation_mode", None) or "null"
    model = getattr(server_args, "served_model_name", None) or server_args.model_path
    if mode == "null":
        found = {"service": model}
    else:
        backend = getattr(server_args, "disaggregation_transfer_backend", None)
        found = {"service": f"{model}-{mode}", "disaggregation_mode": mode, "transfer_backend": backend}
    if (getattr(server_args, "nnodes", None) or 1) > 1:
        found["node_rank"] = server_args.node_rank
    return found


def _describe_scheduler(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> dict[str, Any]:
    return {**description(_server_args(args, kwargs)), "rank": _rank(args[0])}


def _rank(scheduler: Any) -> str | None:
    """Return the process's rank in each kind of parallelism, as in ``tp0 pp0``; None before it is known."""
    context = sys.modules.get(_CONTEXT)
    holder = context.get_parallel() if context is not None and hasattr(context, "get_parallel") else scheduler
    names = {"tp": "tp_rank", "pp": "pp_rank", "dp": "dp_rank", "ep": "moe_ep_rank"}
    ranks = {kind: getattr(holder, name, None) for kind, name in names.items()}
    if ranks["dp"] is None and (getattr(holder, "attn_dp_size", None) or 1) > 1:
        ranks["dp"] = holder.attn_dp_rank  # data parallelism of the attention alone
    return " ".join(f"{kind}{rank}" for kind, rank in ranks.items() if rank is not None) or None


_DESCRIBED = {"description": parameter(1, "server_args", description)}
_LOADED = {"adapter": parameter(1, "lora_ref", lambda reference: reference.lora_name)}
ROLES = {
    "describe_server": Role((f"{_TOKENIZER}.__init__",), reads=_DESCRIBED),
    "describe_detokenizer": Role(
        ("sglang.srt.managers.detokenizer_manager:DetokenizerManager.__init__",), reads=_DESCRIBED
    ),
    "describe_scheduler": Role((f"{_SCHEDULER}.__init__",), reads={"description": _describe_scheduler}),
    # At its start, and by its operator.
    "graph_capture": Role((f"{_RUNNER}.init_cuda_graphs", f"{_RUNNER}.init_device_graphs")),
    "load_model": Role((f"{_RUNNER}.load_model",)),
    "kv_init": Role((f"{_RUNNER}.alloc_memory_pool", f"{_RUNNER}.init_memory_pool")),
    **{
        f"update_weights_from_{source}": Role(
            (f"{_UPDATER}.update_weights_from_{source}", f"{_SCHEDULER}.update_weights_from_{source}"),
        )
        for source in ("disk", "distributed", "tensor", "ipc")
    },
    "start_engine": Role((f"{_SCHEDULER}.__init__",)),
    "load_adapter": Role((f"{_ADAPTERS}.load_lora_adapter",), reads=_LOADED),
    "unload_adapter": Role((f"{_ADAPTERS}.unload_lora_adapter",), reads=_LOADED),
    "flush_cache": Role((f"{_SCHEDULER}.flush_cache",)),
    "pause": Role((f"{_SCHEDULER}.pause_generation",)),
    "pause_by_abort": Role(
        (f"{_TOKENIZER}.pause_generation",),
        reads={"applies": parameter(1, "obj", lambda request: request.mode == "abort")},
    ),
    "resume": Role((f"{_SCHEDULER}.continue_generation",)),
    "sleep": Role((f"{_UPDATER}.release_memory_occupation",)),
    "wake_up": Role((f"{_UPDATER}.resume_memory_occupation",)),
}
#: Of this integration's own observers.
OWN_ROLES = {
    "pack_request": Role(("sglang.srt.observability.req_time_stats:APIServerReqTimeStats.__getstate__",)),
    # Of --smg-grpc-mode.
    "receive_rpc": Role(("smg_grpc_servicer.sglang.request_manager:GrpcRequestManager._req_stats_init",)),
}


def front_end(scheduler: Any) -> Any:
    """Return what has the attributes of the tokenizer manager, which a router over gRPC and the front end in
    Rust do without; else None.
    """
    server_args = scheduler.server_args
    is_by_grpc = any(getattr(server_args, name, False) for name in ("smg_grpc_mode", "grpc_mode"))
    if getattr(scheduler, "rust_server", None) is None and not is_by_grpc:
        return None
    return SimpleNamespace(
        server_args=server_args, served_model_name=server_args.served_model_name, rid_to_state={}
    )


def carried(message: Any) -> tuple[int, int, bool] | None:
    """Return trace id, span id and sampled flag of a request that came from another node."""
    return getattr(getattr(message, "time_stats", None), _CARRIED, None)


def headers(request: Any) -> dict[str, str] | None:
    """Return the trace headers that a program gave, or that came with the call of a router over gRPC."""
    given = getattr(request, "external_trace_header", None)
    return given or getattr(getattr(request, "time_stats", None), _HEADERS, None)


def observers(trackers: Lifecycle) -> Iterable[Observation]:
    """Yield observers that add the trace to requests, for engines with several nodes."""
    carrier = _Carrier(trackers)
    return [
        Observation("describe_server", carrier.meet_server),
        Observation("pack_request", carrier.find, carrier.pack),
        Observation("receive_rpc", lambda args, kwargs: (args, kwargs), carrier.receive_rpc),
    ]


class _Carrier:
    def __init__(self, trackers: Lifecycle) -> None:
        self._current_request = trackers.current_request
        self._has_nodes = False

    def meet_server(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._has_nodes = (getattr(_server_args(args, kwargs), "nnodes", None) or 1) > 1

    def receive_rpc(self, token: Any, result: Any, error: BaseException | None) -> None:
        """Have a message take along the trace headers of its call, for which it has no field."""
        (manager, message, *_), call = token[0], _rpc(*token)
        pairs = call.invocation_metadata() if call is not None and error is None else ()
        if found := {name: each for name, each in pairs if name in ("traceparent", "tracestate")}:
            message.time_stats = manager.rid_to_state[message.rid].time_stats
            setattr(message.time_stats, _HEADERS, found)

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass on the trace at a scheduler; where the request is received, its span is the current one."""
        known = getattr(args[0], _CARRIED, None)
        known = self._current_request() if known is None and self._has_nodes else known
        return {_CARRIED: known, _HEADERS: getattr(args[0], _HEADERS, None)}

    def pack(self, known: Any, result: Any, error: BaseException | None) -> None:
        if isinstance(result, dict):
            result.update({name: each for name, each in known.items() if each is not None})
