"""Prefill and decode on two servers: the phases of a request in SGLang's queues between them.

    prefill server   bootstrap → queue → prefill … → kv_transfer
    decode server    bootstrap → kv_transfer → queue → decode

``bootstrap``: both servers connect and the decode server allocates room for the keys and values. The request
is the same on both except for its id; they share ``bootstrap_room``, from which both derive the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic_ns, perf_counter
from typing import Any

from sgl_aspects.engines.base import Lifecycle, Role
from sgl_aspects.engines.contract import Observation

_PREFILL = "sglang.srt.disaggregation.prefill"
_DECODE = "sglang.srt.disaggregation.decode"
_PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
# The host in requests without another server: warm-ups, and a decode server that is tested alone.
_NO_OTHER_SERVER = "2.2.2.2"

#: Further functions that schedule, instead of the usual one.
SCHEDULES = {
    "schedule_prefill": Role((f"{_SCHEDULER}.get_next_disagg_prefill_batch_to_run",)),
    "schedule_decode": Role((f"{_SCHEDULER}.get_next_disagg_decode_batch_to_run",)),
}
#: Roles of this integration's own observers.
ROLES = {
    # On the prefill server.
    "prefill_bootstrap": Role((f"{_PREFILL}:PrefillBootstrapQueue.add",), ("_", "req")),
    "prefill_bootstrapped": Role((f"{_PREFILL}:PrefillBootstrapQueue.pop_bootstrapped",)),
    "prefill_transferred": Role((f"{_SCHEDULER}.process_disagg_prefill_inflight_queue",)),
    # On the decode server.
    "decode_bootstrap": Role((f"{_DECODE}:DecodePreallocQueue.add",), ("_", "req", "is_retracted")),
    "decode_bootstrapped": Role((f"{_DECODE}:DecodePreallocQueue.pop_preallocated",)),
    "decode_transferred": Role((f"{_DECODE}:DecodeTransferQueue.pop_transferred",)),
    "decode_begins": Role(
        tuple(f"{owner}.process_batch_result_prebuilt" for owner in (_PROCESSOR, _SCHEDULER)),
        ("_", "batch"),
    ),
    # On any server: calls that end a request outside of a batch's result.
    "give_up_request": Role(("sglang.srt.disaggregation.utils:prepare_abort",), ("req", "_", "status_code")),
    "retire_request": Role((f"{_SCHEDULER}.retire_unadmitted_request",), ("_", "req")),
    "abort_output": Role((f"{_SCHEDULER}.send_abort_output",), ("_", "message:abort_req", "req")),
}
_BOOTSTRAP_FAILED, _TRANSFER_FAILED = "bootstrap_failed", "kv_transfer_failed"
_FAILURES = {"bootstrap": _BOOTSTRAP_FAILED, "kv_transfer": _TRANSFER_FAILED}


def bootstrap_room(request: Any) -> int | None:
    """Return the number that both servers have of a request; None if there is no other server."""
    room, host = getattr(request, "bootstrap_room", None), getattr(request, "bootstrap_host", None)
    room, host = (each[0] if isinstance(each, list) and each else each for each in (room, host))
    return room if isinstance(room, int) and host != _NO_OTHER_SERVER else None


def is_first_server(manager: Any) -> bool:
    """Return whether it is the prefill server: the request's span there is the root on both."""
    return str(getattr(manager.server_args, "disaggregation_mode", "")) == "prefill"


def observers(trackers: Lifecycle) -> Iterable[Observation]:
    """Observers that report the phases of requests to the tracker."""
    observer = _DisaggregationObserver(trackers)
    entered: dict[str, Callable[..., Any]] = {
        "prefill_bootstrap": observer.meets_decode_server,
        "decode_bootstrap": observer.meets_prefill_server,
        "decode_begins": observer.decodes,
        "give_up_request": observer.fails,
        "retire_request": observer.is_refused,
        "abort_output": observer.is_aborted,
    }
    left: dict[str, Callable[..., Any]] = {
        "prefill_bootstrapped": observer.waits,
        "prefill_transferred": observer.is_transferred,
        "decode_bootstrapped": observer.receives,
        "decode_transferred": observer.waits,
    }
    for role, enter in entered.items():
        yield Observation(role, enter, observer.has_decoded if role == "decode_begins" else None)
    for role, leave in left.items():
        yield Observation(role, None, leave)


class _DisaggregationObserver:
    def __init__(self, trackers: Lifecycle) -> None:
        self._requests = trackers.requests
        call = trackers.engine.call_reader
        self._prefill_req = call("prefill_bootstrap", "req")
        self._decode_req = call("decode_bootstrap", "req")
        self._is_retracted = call("decode_bootstrap", "is_retracted")
        self._batch = call("decode_begins", "batch")
        self._given_up = call("give_up_request", "req")
        self._status = call("give_up_request", "status_code")
        self._retired = call("retire_request", "req")
        self._aborted = call("abort_output", "req")
        self._abort_message = call("abort_output", "message")
        self._finish_reason = trackers.engine.reader("req.finish_reason")

    def meets_decode_server(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._requests.begins_in(self._prefill_req(args, kwargs).rid, "bootstrap", "kv_transfer")

    def meets_prefill_server(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_retracted(args, kwargs):
            self._requests.begins_in(self._decode_req(args, kwargs).rid, "bootstrap")

    def waits(self, token: None, reqs: Any, error: BaseException | None) -> None:
        for req in reqs or ():  # most often empty: called in each turn of the loop
            self._requests.enter(req.rid, "queue")

    def receives(self, token: None, result: Any, error: BaseException | None) -> None:
        for each in result[0] if result else ():
            self._requests.enter(each.req.rid, "kv_transfer")

    def is_transferred(self, token: None, reqs: Any, error: BaseException | None) -> None:
        for req in reqs or ():
            request, reason = self._requests.requests.get(req.rid), self._finish_reason(req)
            if request is not None and request.phase == "kv_transfer":
                metric = req.disagg_kv_sender.get_transfer_metric()
                request.values = reason, getattr(metric, "transfer_total_bytes", None)
            self._requests.finished(req.rid, len(req.output_ids), reason, now=_transferred_ns(req))

    def decodes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        now, reqs = monotonic_ns(), list(self._batch(args, kwargs).reqs)
        for req in reqs:
            self._requests.enter(req.rid, "decode", now=now)
        return reqs

    def has_decoded(self, reqs: list[Any], result: Any, error: BaseException | None) -> None:
        for req in reqs:  # the first token, which came from the prefill server, may be the last one
            if req.finished_reason is not None:
                self._requests.finished(req.rid, len(req.output_ids), self._finish_reason(req))

    def fails(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rid, status = self._given_up(args, kwargs).rid, self._status(args, kwargs)
        request = self._requests.requests.get(rid)
        if request is not None:
            problem = _refusal(status)
            if not problem and status is not None:
                # Between phases it is the latest exchange with the other server that failed.
                is_prefill_server = request.after_prefill == "kv_transfer"
                latest = _BOOTSTRAP_FAILED if is_prefill_server else _TRANSFER_FAILED
                problem = _FAILURES.get(request.phase, latest)
            self._requests.finished(rid, None, "abort", problem)

    def is_refused(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Rejected by its server before any work on it."""
        self._requests.finished(self._retired(args, kwargs).rid, None, "abort", "rejected")

    def is_aborted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Ended while it waited: by its caller, or because the queue is full or it waited too long."""
        reason = getattr(self._abort_message(args, kwargs), "finished_reason", None) or {}
        self._requests.finished(
            self._aborted(args, kwargs).rid, None, "abort", _refusal(reason.get("status_code"))
        )


def _transferred_ns(req: Any) -> int:
    """Return SGLang's own time of the transfer's end: by now the answer may have left the server. 0: none."""
    end = getattr(getattr(req, "time_stats", None), "prefill_kv_transfer_finish_time", 0.0)
    return monotonic_ns() - int((perf_counter() - end) * 1e9) if end else 0


def _refusal(status: int | None) -> str:
    """Return "rejected" for a status by which the server rejected a request; None is its caller's abort."""
    return "rejected" if status is not None and (status < 500 or status == 503) else ""
