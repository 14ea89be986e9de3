"""Prefill and decode on two servers of vLLM: one trace, with fakes of its requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_aspects.engines import VLLM
from sgl_aspects.engines.vllm.disaggregation import ended
from sgl_aspects.engines.vllm.scheduler import Scheduled
from sgl_aspects.tracing.context import span_id_of_shared
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.lifecycle.calls import CallTracker
from sgl_aspects.tracing.lifecycle.requests import Chunk
from sgl_aspects.tracing.options import DEFAULTS
from tests.support.memory_recorder import Memory
from tests.support.vllm_messages import batch

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


class FakeScheduler:
    """vLLM's scheduler, as far as the observers of transfers see it."""

    def __init__(self, **parameters: Any) -> None:
        self.memory = Memory()
        self.trackers = Trackers.of(VLLM, self.memory, DEFAULTS)
        self._scheduled = Scheduled()
        self._observed = {each.role: each for each in self._scheduled.observations(self.trackers)}
        self._scheduled.meet(self)
        self.request = request("r", **parameters)
        self.request.is_prefill_chunk, self.request.num_output_tokens = False, 1
        self.request.get_finished_reason = lambda: "length"
        self.requests = {"r": self.request}
        self.failed_recving_kv_req_ids: set[str] = set()
        self.trackers.requests.queued("r")

    def has_caches(self, *kinds: Any) -> None:
        """Ten blocks, in two tensors; it is its connector, too."""
        groups = [SimpleNamespace(kv_cache_spec=each) for each in kinds]
        tensors = [SimpleNamespace(size=size) for size in (1000, 600)]
        self._kv_cache_config = SimpleNamespace(
            kv_cache_groups=groups, kv_cache_tensors=tensors, num_blocks=10
        )

    def call(self, role: str, *args: Any, result: Any = None) -> None:
        observed = self._observed[role]
        token = observed.enter((self, *args), {})
        if observed.exit is not None:
            observed.exit(token, result, None)

    def schedule(self, status: str, tokens: int = 0) -> None:
        self.request.status = SimpleNamespace(name=status)
        self._scheduled.begin_transfers()
        self._scheduled.prompts(batch(new={"r": tokens} if tokens else {}))

    def prefill(self) -> None:
        tracked = self.trackers.requests.requests["r"]
        self.trackers.requests.launched(tracked, 1)
        self.trackers.requests.prefilled([Chunk(self.request, tracked, 4, 1, True)])

    @property
    def spans(self) -> list[tuple[str, str]]:
        return [(span.type.name, span.error) for span in self.memory.ended]


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_decode_server_waits_for_keys_and_values(has_failed: bool) -> None:
    server = FakeScheduler(do_remote_prefill=True, remote_request_id="x")
    server.has_caches(SimpleNamespace(block_size=2))
    server.call("begin_transfer", server.request, None, 4)
    server.schedule("WAITING_FOR_REMOTE_KVS")
    assert [name for name, _ in server.spans] == ["queue"]
    server.failed_recving_kv_req_ids |= {"r"} if has_failed else set()
    server.call("end_transfers", SimpleNamespace(finished_recving={"r"}, finished_sending=None))
    server.schedule("RUNNING", tokens=1)
    server.prefill()
    server.trackers.requests.finished("r", 9, "stop")
    failure = "kv_transfer_failed" if has_failed else ""
    assert server.spans == [
        ("queue", ""),
        ("kv_transfer", failure),
        ("queue", ""),
        ("prefill", ""),
        ("decode", ""),
    ]
    (transfer,) = server.memory.named("kv_transfer")
    assert transfer.values == (None, 2 * (100 + 60))


@pytest.mark.parametrize(
    ("sources", "found"),
    [({"p2p": 3, "host": 1}, (None, 1, None, 3, None)), (None, (None, None, None, None, 4))],
)
def test_cached_tokens_have_the_name_of_their_tier(sources: dict[str, int] | None, found: Any) -> None:
    """Where the connector names it: vLLM does since 0.32. What was computed before a preemption is none."""
    server = FakeScheduler()
    server.call("begin_transfer", server.request, None, 4)
    server.call("name_tiers", server.request, result=sources)
    server.schedule("RUNNING", tokens=1)
    server.prefill()
    server.trackers.requests.preempted("r", 1)
    server.call("begin_transfer", server.request, None, 5)
    server.trackers.requests.finished("r", 1, "abort")
    first, second = server.memory.named("queue")
    assert (first.values, second.values) == (found, ("abort",))


def test_bytes_of_layers_of_several_kinds_are_not_known() -> None:
    server = FakeScheduler()
    server.has_caches(*[SimpleNamespace(block_size=2)] * 2)
    server.call("begin_transfer", server.request, None, 4)
    server.schedule("WAITING_FOR_REMOTE_KVS")
    server.call("end_transfers", SimpleNamespace(finished_recving={"r"}, finished_sending=None))
    (transfer,) = server.memory.named("kv_transfer")
    assert transfer.values == (None, None)


def test_a_request_that_is_aborted_while_it_waits_keeps_reason_and_bytes() -> None:
    server = FakeScheduler()
    server.has_caches(SimpleNamespace(block_size=2))
    server.call("begin_transfer", server.request, None, 2)
    server.schedule("WAITING_FOR_REMOTE_KVS")
    server.trackers.requests.finished("r", 0, "abort")
    (transfer,) = server.memory.named("kv_transfer")
    assert transfer.values == ("abort", 160)


def test_keys_and_values_that_are_there_at_once_are_not_waited_for() -> None:
    server = FakeScheduler()
    server.call("begin_transfer", server.request, None, 4)
    server.schedule("RUNNING", tokens=1)
    server.prefill()
    server.trackers.requests.finished("r", 9, "stop")
    assert [name for name, _ in server.spans] == ["queue", "prefill", "decode"]


def test_a_prefill_server_ends_a_request_when_it_was_fetched() -> None:
    server = FakeScheduler(do_remote_decode=True)
    server.schedule("RUNNING", tokens=4)
    server.prefill()
    assert ended(server.request) == ""  # at the end of the prompt, not of the request
    assert [name for name, _ in server.spans] == ["queue", "prefill"]
    server.call("free_blocks", server.request)
    assert server.spans == [("queue", ""), ("prefill", ""), ("kv_transfer", "")]
