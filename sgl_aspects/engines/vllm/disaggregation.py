"""Prefill and decode on two servers: the phases of a request, and the number that its trace is derived from.

    prefill server   queue → prefill … → kv_transfer
    decode server    queue → kv_transfer → queue → prefill (the last token) → decode

Connectors put the number into ``kv_transfer_params``: mooncake and MoRIIO one ``transfer_id`` on both
servers; NIXL gives the decode server the prefill server's request id (``remote_request_id``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from time import monotonic_ns
from typing import Any

from sgl_aspects.engines.base import Lifecycle, Role
from sgl_aspects.engines.contract import Observation

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1+"
_SEEN = f"{_CONNECTOR}.update_state_after_alloc"
_TRANSFER, _FAILED = "kv_transfer", "kv_transfer_failed"
#: Where cached tokens came from, in the order of the attributes of ``queue``.
_SOURCES = "host", "disk", "p2p", "external_unspecified"

#: Roles of this integration's own observers.
ROLES = {
    "begin_transfer": Role((_SEEN,), ("connector:self", "req:request", "_", "tokens:num_external_tokens")),
    # A connector names them since 0.32; the other returns nothing.
    "name_tiers": Role((f"{_CONNECTOR}.get_external_cache_hit_sources", _SEEN), ("_", "req:request")),
    "end_transfers": Role(
        (f"{_SCHEDULER}._update_from_kv_xfer_finished",), ("scheduler:self", "ended:kv_connector_output")
    ),
    "free_blocks": Role((f"{_SCHEDULER}._free_blocks",), ("_", "req:request")),
}


def _parameters(request: Any) -> dict[str, Any]:
    extra = getattr(getattr(request, "sampling_params", None), "extra_args", None) or {}
    found = extra.get("kv_transfer_params")
    return found if isinstance(found, dict) else {}


def is_first_server(request: Any) -> bool:
    """Return whether the request's prompt is prefilled here, and its answer decoded elsewhere."""
    return bool(_parameters(request).get("do_remote_decode"))


def ended(request: Any) -> Any:
    """Return the request that ends; "" for one that ends when the other server has its keys and values."""
    return "" if is_first_server(request) else request


def shared_key(request: Any) -> int | None:
    """Return a number that both servers can derive; None if there is no other server or no such number."""
    parameters = _parameters(request)
    shared = parameters.get("transfer_id") or parameters.get("remote_request_id")
    if not shared and parameters.get("do_remote_decode"):
        shared = request.request_id
    if not shared:
        return None
    return int.from_bytes(hashlib.blake2b(str(shared).encode(), digest_size=7).digest(), "big")


def description(settings: Any) -> dict[str, Any]:
    """Return the server's role and connector, if it is a prefill or a decode server; else {}.

    A server whose ``kv_role`` is ``kv_both`` has a connector but no role.
    """
    config = getattr(settings, "kv_transfer_config", None)
    role: Any = getattr(config, "kv_role", None)
    mode = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(role)
    found = {} if config is None else {"transfer_backend": config.kv_connector}
    if mode is not None:
        found |= {"service": f"{settings.model_config.served_model_name}-{mode}", "disaggregation_mode": mode}
    return found


def _size(connector: Any, tokens: int) -> int | None:
    """Return the bytes of these tokens' keys and values on one rank; None where layers differ in kind."""
    config = getattr(connector, "_kv_cache_config", None)
    if config is None or len(config.kv_cache_groups) != 1:
        return None
    of_block = sum(tensor.size for tensor in config.kv_cache_tensors) // config.num_blocks
    return int(of_block * tokens // config.kv_cache_groups[0].kv_cache_spec.block_size)


class Transfers:
    """Reports the transfers of one scheduler's requests to the tracker, before and after their own work.

    ``seen``: requests that a connector has just seen, when, and how many bytes it will bring.
    """

    def __init__(self, trackers: Lifecycle, seen: dict[str, tuple[Any, int, int | None]]) -> None:
        self._requests = trackers.requests
        call = trackers.engine.call_reader
        self._begun = [call("begin_transfer", each) for each in ("req", "connector", "tokens")]
        self._scheduler, self._ended = call("end_transfers", "scheduler"), call("end_transfers", "ended")
        self._freed, self._req_of_tiers = call("free_blocks", "req"), call("name_tiers", "req")
        self.seen = seen

    def observations(self) -> Iterable[Observation]:
        return [
            Observation("begin_transfer", self._see),
            Observation("name_tiers", self._req_of_tiers, self._name_tiers),
            Observation("end_transfers", self._end),
            Observation("free_blocks", self._free),
        ]

    def begin(self) -> None:
        """After scheduling: begin the transfers of waiting requests, at the time the connector saw them."""
        for rid, (request, seen_ns, size) in self.seen.items():
            if request.status.name == "WAITING_FOR_REMOTE_KVS":
                self._requests.enter(rid, _TRANSFER, now=seen_ns)
                if tracked := self._requests.requests.get(rid):
                    tracked.values = None, size
        self.seen.clear()

    def prefills(self, request: Any) -> None:
        """Note a request whose prompt is in a batch for the first time."""
        tracked = self._requests.requests.get(request.request_id)
        if tracked is not None and is_first_server(request):
            tracked.after_prefill = _TRANSFER

    def _see(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        request, connector, tokens = (read(args, kwargs) for read in self._begun)
        self.seen.setdefault(request.request_id, (request, monotonic_ns(), _size(connector, tokens)))
        self._name_tiers(request, tokens and {_SOURCES[-1]: tokens}, None)

    def _name_tiers(self, request: Any, sources: Any, error: BaseException | None) -> None:
        tracked = self._requests.requests.get(request.request_id)
        if tracked is not None and not tracked.fed and sources:
            tracked.values = None, *map(sources.get, _SOURCES)

    def _end(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        failed = getattr(self._scheduler(args, kwargs), "failed_recving_kv_req_ids", ())
        for rid in self._ended(args, kwargs).finished_recving or ():
            self._requests.enter(rid, "queue", _FAILED if rid in failed else "")

    def _free(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """End a request for another server, which has its keys and values now, or never fetched them."""
        request = self._freed(args, kwargs)
        if is_first_server(request):
            reason = str(request.get_finished_reason())
            self._requests.finished(request.request_id, request.num_output_tokens, reason)
