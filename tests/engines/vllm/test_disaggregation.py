"""Prefill and decode on two servers of vLLM: one trace, with fakes of its requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_aspects.engines import VLLM
from sgl_aspects.tracing.context import span_id_of_shared
from sgl_aspects.tracing.lifecycle.calls import CallTracker
from sgl_aspects.tracing.options import DEFAULTS
from tests.support.memory_recorder import Memory

MANAGER = SimpleNamespace(model_config=SimpleNamespace(served_model_name="mini"))


def request(rid: str, **parameters: Any) -> SimpleNamespace:
    extra = {"kv_transfer_params": parameters} if parameters else None
    sampling = SimpleNamespace(extra_args=extra, n=1, output_kind=None)
    return SimpleNamespace(request_id=rid, sampling_params=sampling, pooling_params=None, trace_headers=None)


def begun(each: Any, headers: dict[str, str] | None = None) -> Any:
    recorder = Memory()
    return CallTracker(VLLM, recorder, DEFAULTS).begin(each, MANAGER, 1, headers=headers)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        # NIXL: the fields of the prefill server's answer are sent on to the decode server.
        ({"do_remote_decode": True}, {"do_remote_prefill": True, "remote_request_id": "cmpl-1-abc"}),
        # mooncake, MoRIIO
        (
            {"do_remote_decode": True, "transfer_id": "t1"},
            {"do_remote_prefill": True, "transfer_id": "t1", "remote_engine_id": "e"},
        ),
    ],
)
def test_both_servers_derive_one_trace(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    first, second = begun(request("cmpl-1-abc", **prefill)), begun(request("cmpl-9-def", **decode))
    assert first.origin.trace_id == second.origin.trace_id
    assert first.origin.parent_id == 0
    assert second.origin.parent_id == first.span_id != second.span_id
    assert second.origin.remote


def test_a_callers_trace_goes_on() -> None:
    headers = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
    call = begun(request("r", do_remote_decode=True), headers)
    assert (call.origin.trace_id, call.origin.parent_id) == (7, 9)


def test_a_request_for_one_server_is_its_own() -> None:
    calls = [begun(request("same")) for _ in range(2)]
    assert calls[0].origin.trace_id != calls[1].origin.trace_id
    assert all(call.span_id < 1 << 63 for call in calls)
    # A decode server whose connector has no field for the other one's request.
    assert begun(request("r", do_remote_prefill=True, remote_engine_id="e")).origin.parent_id == 0
    assert span_id_of_shared(1) >> 63
