"""Requests of vLLM's replicas on other hosts: the front end has their times by vLLM's own figures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sgl_aspects.engines.vllm.roles import VLLM
from sgl_aspects.tracing import context
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.lifecycle.calls import Call
from sgl_aspects.tracing.options import DEFAULTS
from sgl_aspects.tracing.records import RequestBegin
from tests.support.joined import Joined
from tests.support.memory_recorder import Memory
from tests.support.stepping import Loop


class Replicas:
    """A front end of vLLM whose replica 1 is on another host. ``joined``: its answered requests."""

    def __init__(self) -> None:
        self.joined = Joined()
        self._recorder = Memory()
        trackers = Trackers.of(VLLM, self._recorder, DEFAULTS)
        assert VLLM.observers is not None
        self._loop, self._calls = Loop(VLLM.observers(trackers)), trackers.calls

    def answer(self, rid: str, rank: int, times: tuple[float, float, float, float]) -> None:
        """``times``: when it was queued and scheduled there, and had its first and last token, in seconds."""
        parallel = SimpleNamespace(local_engines_only=False, data_parallel_size_local=1)
        client = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
        request = SimpleNamespace(request_id=rid, trace_headers=None)
        names = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
        stats = SimpleNamespace(**dict(zip(names, times)))
        origin = TraceContext(5, 7, True, "", False)
        call = self._calls.live[rid] = Call(self._recorder.new_id(), rid, 1, origin, "chat mini")
        call.streams = False
        opened = self._calls.enter(call)
        with self._loop.call("carry_trace", client, object(), request, rank.to_bytes(2, "little")):
            context.leave(opened)
        with self._loop.call("count_times", object(), SimpleNamespace(request_id=rid, stats=stats)):
            self._calls.end(call, "length")
        self.joined.of_caller(RequestBegin(call.span_id, rid, 1, *call.origin, call.name, {}))
        self.joined.of_caller(*self._recorder.ended)
        self._recorder.ended.clear()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_of_a_replica_on_another_host_has_its_times_from_vllms_figures(rank: int) -> None:
    """In seconds of that host's clock; of a replica here they are those of its phases."""
    replicas = Replicas()
    replicas.answer("a", rank, (7.0, 7.5, 9.5, 10.5))
    replicas.joined.finish()
    assert replicas.joined.names == ["chat mini"]
    prefix = "gen_ai.latency.time_in_"
    times = replicas.joined.spans[0].attributes
    times = {name: each for name, each in times.items() if name.startswith(prefix)}
    expected = {"queue": 0.5, "model_prefill": 2.0, "model_decode": 1.0, "model_inference": 3.0}
    assert times == pytest.approx({prefix + name: each for name, each in expected.items() if rank})


def test_an_answer_of_another_host_that_the_front_end_takes_late_was_not_queued_late() -> None:
    replicas = Replicas()
    replicas.answer("on time", 1, (107.0, 107.5, 109.5, 110.5))
    replicas.answer("a minute late", 1, (47.0, 47.5, 49.5, 50.5))
    replicas.answer("of another clock", 2, (47.0, 47.5, 49.5, 50.5))
    replicas.joined.finish()
    on_time, late, other = (
        span.attributes["sgl_aspects.latency.time_to_queue"] for span in replicas.joined.spans
    )
    assert late == pytest.approx(on_time - 60)
    assert other == pytest.approx(on_time, abs=30)
