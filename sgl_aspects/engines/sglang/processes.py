"""What each of a server's processes is: the model that it serves, its role among servers, its rank."""

from __future__ import annotations

import sys
from typing import Any

from sgl_aspects.engines.base import Role

_CONTEXT = "sglang.srt.runtime_context"


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> dict[str, Any] | None:
    server_args = args[1] if len(args) > 1 else kwargs.get("server_args")
    if server_args is None:
        return None
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


def _describe_scheduler(
    args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None
) -> dict[str, Any] | None:
    found = _describe(args, kwargs)
    if found is not None:
        found["rank"] = _rank(args[0])
    return found


def _rank(scheduler: Any) -> str | None:
    """As in ``tp0 pp0``: the process's rank in each kind of parallelism; None before it is known."""
    context = sys.modules.get(_CONTEXT)
    holder = context.get_parallel() if context is not None and hasattr(context, "get_parallel") else scheduler
    names = {"tp": "tp_rank", "pp": "pp_rank", "dp": "dp_rank", "ep": "moe_ep_rank"}
    ranks = {kind: getattr(holder, name, None) for kind, name in names.items()}
    return " ".join(f"{kind}{rank}" for kind, rank in ranks.items() if rank is not None) or None


ROLES = {
    "describe_server": Role(
        ("sglang.srt.managers.tokenizer_manager:TokenizerManager.__init__",), reads={"description": _describe}
    ),
    "describe_detokenizer": Role(
        ("sglang.srt.managers.detokenizer_manager:DetokenizerManager.__init__",),
        reads={"description": _describe},
    ),
    "describe_scheduler": Role(
        ("sglang.srt.managers.scheduler:Scheduler.__init__",), reads={"description": _describe_scheduler}
    ),
}
