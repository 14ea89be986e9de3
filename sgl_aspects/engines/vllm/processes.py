"""The description of each server process: its model, its role among servers, its node, its rank."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, TypeAlias

from sgl_aspects.engines.base import Role
from sgl_aspects.engines.vllm import disaggregation

_Description: TypeAlias = "dict[str, Any] | None"


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> _Description:
    settings = args[1] if len(args) > 1 else kwargs.get("vllm_config")
    return None if settings is None else description(settings)


def description(settings: Any) -> dict[str, Any]:
    """Return a server's description from its configuration: its model, its role among servers, its node."""
    found = {"service": settings.model_config.served_model_name, **disaggregation.description(settings)}
    if (getattr(settings.parallel_config, "nnodes", None) or 1) > 1:
        found["node_rank"] = settings.parallel_config.node_rank
    return found


def _describe_core(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> _Description:
    return _with_rank(args, kwargs, lambda parallel: {"dp": _replica(parallel)})


def _replica(parallel: Any) -> int:
    """Return the replica's number; its rank is 0 where replicas are independent of each other."""
    return int(getattr(parallel, "data_parallel_index", None) or parallel.data_parallel_rank)


def _describe_worker(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None) -> _Description:
    def ranks(parallel: Any) -> dict[str, int]:
        stage, rank = divmod(parallel.rank, parallel.tensor_parallel_size)
        return {"tp": rank, "pp": stage, "dp": _replica(parallel)}

    return _with_rank(args, kwargs, ranks)


def _with_rank(args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Any) -> _Description:
    found = _describe(args, kwargs)
    if found is not None:
        settings = args[1] if len(args) > 1 else kwargs["vllm_config"]
        known = ranks(settings.parallel_config)
        found["rank"] = " ".join(f"{kind}{rank}" for kind, rank in known.items())
    return found


def front_end(scheduler: Any) -> Any:
    """Return what has the attributes of the engine's client if that is not Python; else None."""
    if os.environ.get("VLLM_USE_RUST_FRONTEND") != "1":
        return None
    settings = scheduler.vllm_config
    return SimpleNamespace(vllm_config=settings, model_config=settings.model_config)


ROLES = {
    "describe_server": Role(
        ("vllm.v1.engine.async_llm:AsyncLLM.__init__",), reads={"description": _describe}
    ),
    "describe_scheduler": Role(
        ("vllm.v1.core.sched.scheduler:Scheduler.__init__",), reads={"description": _describe_core}
    ),
    "describe_worker": Role(
        ("vllm.v1.worker.**:GPUModelRunner.__init__",), reads={"description": _describe_worker}
    ),
}
