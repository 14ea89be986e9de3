"""The phases of a request in SGLang's queues between two servers, with fakes of its objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sgl_aspects.engines import SGLANG
from sgl_aspects.engines.sglang.disaggregation import bootstrap_room
from sgl_aspects.tracing import context
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.lifecycle.requests import Chunk
from sgl_aspects.tracing.options import DEFAULTS
from tests.support.memory_recorder import Memory


class Server:
    """The observers of one server: ``call`` is a call of the function that plays a role."""

    def __init__(self) -> None:
        self.recorder = Memory()
        self.trackers = Trackers.of(SGLANG, self.recorder, DEFAULTS)
        assert SGLANG.observers is not None
        self.observed = {one.role: one for one in SGLANG.observers(self.trackers)}

    def call(self, role: str, *args: Any, result: Any = None) -> None:
        observation = self.observed[role]
        token = observation.enter((object(), *args), {}) if observation.enter else None
        if observation.exit:
            observation.exit(token, result, None)

    def give_up(self, req: Any, status: int | None = 500) -> None:
        self.observed["give_up_request"].enter((req, "why"), {"status_code": status})

    @property
    def spans(self) -> list[tuple[str, str]]:
        return [(span.type.name, span.error) for span in self.recorder.ended]


def req(rid: str = "r", reason: Any = None) -> SimpleNamespace:
    metric = SimpleNamespace(transfer_total_bytes=4096)
    sender = SimpleNamespace(get_transfer_metric=lambda: metric)
    return SimpleNamespace(rid=rid, finished_reason=reason, output_ids=[1], disagg_kv_sender=sender)


def test_a_prefill_server() -> None:
    server, one = Server(), req(reason={"type": "length"})
    request = server.trackers.requests.queued("r")
    server.call("prefill_bootstrap", one)
    server.call("prefill_bootstrapped", result=[one])
    server.trackers.requests.launched(request, request.phase_ns + 1)
    server.trackers.requests.prefilled([Chunk(one, request, 7, request.phase_ns + 1, True)])
    server.call("prefill_transferred", result=[one])
    assert [name for name, _ in server.spans] == ["bootstrap", "queue", "prefill", "kv_transfer"]
    assert server.recorder.ended[-1].values == ("length", 4096)


def test_a_decode_server() -> None:
    server, one = Server(), req()
    server.trackers.requests.queued("r")
    server.call("decode_bootstrap", one)
    server.call("decode_bootstrapped", result=([SimpleNamespace(req=one)], []))
    server.call("decode_transferred", result=[one])
    server.call("decode_begins", SimpleNamespace(reqs=[one]))
    server.trackers.requests.finished("r", 5, "stop")
    assert [name for name, _ in server.spans] == ["bootstrap", "kv_transfer", "queue", "decode"]


def test_an_answer_of_one_token_ends_as_it_comes() -> None:
    server, one = Server(), req(reason={"type": "length"})
    server.trackers.requests.queued("r")
    server.call("decode_bootstrap", one)
    server.call("decode_begins", SimpleNamespace(reqs=[one]))
    assert [name for name, _ in server.spans] == ["bootstrap", "decode"]


def test_what_fails_in_between_ends_with_the_reason() -> None:
    for phase, error in (("bootstrap", "bootstrap_failed"), ("kv_transfer", "kv_transfer_failed")):
        server, one = Server(), req()
        server.trackers.requests.queued("r")
        server.call("decode_bootstrap", one)
        server.trackers.requests.enter("r", phase)
        server.give_up(one)
        assert server.spans[-1] == (phase, error)
    for role, error in (
        ("prefill_bootstrap", "bootstrap_failed"),
        ("decode_bootstrap", "kv_transfer_failed"),
    ):
        server, one = Server(), req()
        server.trackers.requests.queued("r")
        server.call(role, one)
        server.trackers.requests.enter("r", "queue")
        server.give_up(one)  # as where the other server dies before the batch
        assert server.spans[-1] == ("queue", error)


def test_a_request_that_its_server_refuses_has_ended() -> None:
    for status, error in ((400, "rejected"), (None, "")):  # None: aborted by its caller
        server = Server()
        server.trackers.requests.queued("r")
        server.give_up(req(), status)
        assert server.spans == [("queue", error)]
    server, one = Server(), req()
    server.trackers.requests.queued("r")
    server.call("prefill_bootstrap", one)
    server.call("retire_request", one)
    assert server.spans == [("bootstrap", "rejected")]
    assert not server.trackers.requests.requests


def test_a_request_that_is_aborted_as_it_waits_has_ended() -> None:
    full = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
    for reason, error in ((full, "rejected"), (None, "")):
        server = Server()
        server.trackers.requests.queued("r")
        server.call("abort_output", SimpleNamespace(rid="r", finished_reason=reason), req())
        assert server.spans == [("queue", error)]
        assert server.recorder.ended[-1].values == ("abort",)
        assert not server.trackers.requests.requests


def test_a_request_that_gave_way_is_in_the_queue() -> None:
    server, one = Server(), req()
    server.trackers.requests.queued("r")
    server.call("decode_bootstrap", one, True)
    assert server.trackers.requests.requests["r"].phase == "queue"


def test_the_room_is_what_both_servers_know() -> None:
    request = SimpleNamespace(bootstrap_room=[5, 6], bootstrap_host=["10.0.0.1", "10.0.0.1"])
    assert bootstrap_room(request) == 5
    assert bootstrap_room(SimpleNamespace(bootstrap_room=5, bootstrap_host="2.2.2.2")) is None  # a warm-up
    assert bootstrap_room(SimpleNamespace()) is None


def test_both_servers_derive_one_trace() -> None:
    prefill = context.of_request({}, shared=(1234, True))
    decode = context.of_request({}, shared=(1234, False))
    assert prefill.trace_id == decode.trace_id != context.of_request({}, shared=(1235, True)).trace_id
    assert (prefill.parent_id, decode.parent_id) == (0, context.span_id_of_shared(1234))
    assert decode.remote
    assert context.root_of_trace_id(prefill.trace_id) == 0  # no process takes it for a step's
    share = 1 << 31
    kept = [context.of_request({}, share, shared=(n, True)).sampled for n in range(1000)]
    assert kept == [context.of_request({}, share, shared=(n, False)).sampled for n in range(1000)]
    assert 400 < sum(kept) < 600
    called = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
    assert context.of_request(called, shared=(1234, True)).trace_id == 7
