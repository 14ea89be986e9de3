"""Forward spans and the device's clock: what is timed of an eager pass, and of one that is replayed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sgl_aspects as aspects
from sgl_aspects.engines import EMBEDDED, SGLANG, VLLM, Engine
from sgl_aspects.engines.base import Outcome, Role
from sgl_aspects.platforms import DeviceGraph
from sgl_aspects.runtime.core import ForwardMode
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.lifecycle.requests import Chunk, ScheduledRequest
from sgl_aspects.tracing.observers.forward import ForwardObserver
from sgl_aspects.tracing.observers.steps import StepObserver
from sgl_aspects.tracing.options import DEFAULTS
from sgl_aspects.tracing.record.format import SAMPLE_ALL
from sgl_aspects.tracing.record.open_steps import OpenSteps
from sgl_aspects.tracing.schema import DEVICE_TIME, GRAPH
from tests.support import stand_ins
from tests.support.memory_recorder import Memory
from tests.support.stepping import Loop
from tests.support.vllm_messages import batch

#: How an engine reports which requests have ended.
ENDS: dict[str, Any] = {
    "batch.finished": lambda batch: [req for req in batch.reqs if req.reason],
    "req.finish_reason": lambda req: req.reason,
}


class Clock:
    """A device whose clock is advanced by the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.recorded = 0

    def is_capturing(self) -> bool:
        return False

    def current_stream(self) -> None: ...

    def stream_handle(self, stream: Any) -> int:
        return 0

    def create_event(self) -> Any:
        event = SimpleNamespace(at=-1.0)

        def record(stream: Any) -> None:
            event.at = self.now
            self.recorded += 1

        event.marker, event.recorder = lambda: record, lambda: None
        event.timer = lambda end: lambda: (end.at - event.at) * 1e3
        return event


class Graph(DeviceGraph):
    """Takes two seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def capture(self, work: Any) -> Any:
        return work()

    def replay(self) -> None:
        self.clock.now += 2.0


def loop_of(engine: Engine, recorder: Memory) -> Loop:
    """With the observers of the steps and of their forward passes."""
    trackers = Trackers.of(engine, recorder, DEFAULTS)
    return Loop([*StepObserver(trackers).observations(), *ForwardObserver(trackers).observations()])


def test_what_the_host_prepares_for_a_replay_is_not_device_time() -> None:
    recorder, clock = Memory(), Clock()
    loop = loop_of(EMBEDDED, recorder)
    launch = aspects.Advice(
        aspects.Target.parse(EMBEDDED.roles["graph_launch"].targets),
        aspects.HookType.OBSERVE,
        loop.found["graph_launch"],
    )
    runner = SimpleNamespace(platform=clock)
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, reqs=[object()], step_id=1)
    recorded: list[int] = []
    with aspects.woven(launch):
        for is_replayed in (False, True, True, False, False):
            with loop.run(batch) as result, loop.call("forward", runner, batch):
                clock.now += 1.0  # launching one by one, or preparing a replay
                if is_replayed:
                    Graph(clock).replay()
            loop.process(batch, result)
            recorded.append(clock.recorded)
        Graph(clock).replay()  # outside any pass
    values = [dict(zip(span.type.attributes, span.values)) for span in recorder.named("forward")]
    assert [each[GRAPH] for each in values] == ["eager", "replayed", "replayed", "eager", "eager"]
    assert [each[DEVICE_TIME] for each in values] == [1.0, 2.0, 2.0, None, 1.0]
    # A pass is expected to be like the last one: the first replay begins twice, the next eager pass never.
    assert [after - before for before, after in zip([0, *recorded], recorded)] == [2, 3, 2, 0, 2]


class Module:
    """An extension's ``torch.<its device>``: work goes to a queue, time passes there."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0.0  # how far the device has come
        self.waited = 0
        self.is_captured = False

    def is_current_stream_capturing(self) -> bool:
        return self.is_captured

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        assert enable_timing
        event = SimpleNamespace(at=-1.0)
        event.record = lambda stream=None: setattr(event, "at", self.now)
        event.query = lambda: self.done >= event.at
        event.synchronize = lambda: setattr(self, "waited", self.waited + 1)

        def elapsed_time(end: Any) -> float:
            if self.done < end.at:
                raise RuntimeError("device not ready")
            return float(end.at - event.at) * 1e3

        event.elapsed_time = elapsed_time
        return event

    def current_stream(self) -> None: ...


def test_a_pass_whose_step_runs_in_another_process_has_its_device_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read with a later pass; at the end, passes that the device has not reached are recorded without it."""
    device = Module()
    monkeypatch.setattr(torch, "somebodys", device, raising=False)
    recorder, found = Memory(), []
    observer = ForwardObserver(Trackers.of(VLLM, recorder, DEFAULTS))
    loop = Loop(observer.observations())
    for place, device.is_captured in (
        *(("somebodys:0", False), ("somebodys:0", False)),
        *(("meta", False), ("somebodys:0", True), ("somebodys:0", False)),
    ):
        with loop.call("forward", SimpleNamespace(device=place), batch(cached={"a": (5, 1)})):
            device.now += 1.0
        device.done = min(device.now, 2.0)
        found.append(len(recorder.named("forward")))
    observer.worker.flush()
    spans = [dict(zip(span.type.attributes, span.values)) for span in recorder.named("forward")]
    assert [each.get(DEVICE_TIME) for each in spans] == [1.0, 1.0, None, None, None]
    assert found == [0, 1, 3, 4, 4]
    assert device.waited == 0


def test_sglangs_forward_has_the_time_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any device of torch, also of an extension; read with the batch's result, without waiting."""
    device = Module()
    monkeypatch.setattr(torch, "somebodys", device, raising=False)
    recorder = Memory()
    loop, runner = loop_of(SGLANG, recorder), SimpleNamespace(device="somebodys:0")
    launched = []
    for seconds in (1.0, 2.0):  # two are launched before the first one's result is processed
        batch = SimpleNamespace(
            forward_mode=stand_ins.ForwardMode.DECODE, reqs=[SimpleNamespace(finished_reason=None)] * 3
        )
        with loop.run(batch) as result, loop.call("forward", runner, batch):
            device.now += seconds
        launched.append((batch, result))
    for device.done, (batch, result) in zip((0.5, 3.0), launched):  # the first is late
        loop.process(batch, result)
    values = {("decode", 3, 3, "somebodys", seconds, "eager") for seconds in (1.0, 2.0)}
    assert {tuple(span.values) for span in recorder.named("forward")} == values
    assert device.waited == 0


def test_the_device_time_of_a_replay_is_around_the_launch_of_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's backends of graphs: what the runner does before and after is not the device's time."""
    device = Module()
    device.done = 100.0
    monkeypatch.setattr(torch, "somebodys", device, raising=False)
    recorder = Memory()
    loop, runner = loop_of(SGLANG, recorder), SimpleNamespace(device="somebodys:0")
    req = SimpleNamespace(finished_reason=None)
    for launches in (1, 1, 2, 1):
        batch = SimpleNamespace(forward_mode=stand_ins.ForwardMode.DECODE, reqs=[req])
        with loop.run(batch) as result, loop.call("forward", runner, batch):
            device.now += 0.5
            for _ in range(launches):
                with loop.call("graph_launch", object()):
                    device.now += 1.0
                device.now += 0.25
        loop.process(batch, result)
    # The pass with two launches is all that is between and after them.
    times = [(span.values[4], span.values[5]) for span in recorder.named("forward")]
    assert times == [(each, "replayed") for each in (1.0, 1.0, 2.5, 1.0)]


@pytest.mark.parametrize("encodes", [False, True])
def test_the_device_time_of_vllms_pass_is_around_its_replay(encodes: bool) -> None:
    """What it prepares before is not the device's time; of an eager pass it is, an encoder's graphs too."""
    engine = dataclasses.replace(VLLM, attributes={**VLLM.attributes, "model_runner.platform": "platform"})
    recorder, clock = Memory(), Clock()
    loop, runner = loop_of(engine, recorder), SimpleNamespace(platform=clock)
    message = batch(cached={"a": (5, 1)})
    for is_replayed in (True, True, False, False, True, True):
        with loop.run(message) as result, loop.call("forward", runner, message):
            clock.now += 1.0
            if encodes:
                with loop.call("run_encoder", object()), loop.call("graph_launch", object()):
                    clock.now += 8.0
            with loop.call("graph_launch", object()) if is_replayed else nullcontext():
                clock.now += 2.0
            clock.now += 4.0
        loop.process(message, result)
    values = [dict(zip(span.type.attributes, span.values)) for span in recorder.named("forward")]
    replayed, eager = ("replayed", 2.0), ("eager", 15.0 if encodes else 7.0)
    # The first eager pass after a replay was expected to be one.
    expected = [replayed, replayed, ("eager", None), eager, replayed, replayed]
    assert [(each[GRAPH], each[DEVICE_TIME]) for each in values] == expected


def test_a_batch_without_requests_is_no_step() -> None:
    assert loop_of(VLLM, Memory()).found["run_batch"].enter((object(), batch()), {}) is None


@pytest.mark.parametrize(("level", "seconds", "timed"), [(3, 0.001, 5), (3, 0.02, 34), (4, 0.001, 34)])
def test_of_short_replays_one_in_eight_has_its_device_time_below_level_4(
    level: int, seconds: float, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair of events takes the host longer than all else at level 3. A pass with no replay has its time."""
    device = Module()
    device.done = 100.0
    monkeypatch.setattr(torch, "somebodys", device, raising=False)
    recorder = Memory()
    recorder.level = level
    loop, runner = loop_of(SGLANG, recorder), SimpleNamespace(device="somebodys:0")
    req = SimpleNamespace(finished_reason=None)
    decode, extend = stand_ins.ForwardMode.DECODE, stand_ins.ForwardMode.EXTEND
    for mode in (*[decode] * 17, extend, *[decode] * 16, extend, decode):
        batch = SimpleNamespace(forward_mode=mode, reqs=[req])
        launch = loop.call("graph_launch", object()) if mode is decode else nullcontext()
        with loop.run(batch) as result, loop.call("forward", runner, batch), launch:
            device.now += seconds
        loop.process(batch, result)
    values = [span.values for span in recorder.named("forward")]
    times = [(value[5], value[4] is not None) for value in values]
    assert times.count(("eager", True)) == 2
    assert times.count(("replayed", True)) == timed


@pytest.mark.parametrize(("device", "name"), [("cpu", "cpu"), ("nobodys:1", None)])
def test_sglangs_device_is_one_of_ours_where_there_is_one(device: str, name: str | None) -> None:
    platform = SGLANG.reader("model_runner.platform")(
        SimpleNamespace(device=torch.device(device) if name else device)
    )
    assert getattr(platform, "device_name", None) == name


@dataclasses.dataclass
class Scheduler:
    """A loop of the embedded engine's, where the batch says which requests have ended."""

    trackers: Trackers
    recorder: Memory
    loop: Loop

    def queued(self, rid: str) -> tuple[Any, ScheduledRequest]:
        """A request, as the engine has it and as its tracker does."""
        return SimpleNamespace(rid=rid, output_ids=[1], reason=None), self.trackers.requests.queued(rid)

    def decoding(self, rid: str) -> Any:
        req, request = self.queued(rid)
        self.trackers.requests.resume(request, 1)
        return req


def scheduler_of(engine: Engine = EMBEDDED, scheduler: Any = None) -> Scheduler:
    engine = dataclasses.replace(engine, attributes={**engine.attributes, **ENDS})
    recorder = Memory()
    trackers = Trackers.of(engine, recorder, DEFAULTS)
    return Scheduler(trackers, recorder, Loop(StepObserver(trackers).observations(), scheduler))


def decodes(*reqs: Any, number: int = 1) -> Any:
    return SimpleNamespace(forward_mode=ForwardMode.DECODE, reqs=list(reqs), step_id=number)


def ending(req: Any, reason: str | None) -> Callable[[Any], None]:
    """What gives the request this reason as its result is processed."""
    return lambda step: setattr(req, "reason", reason)


def test_an_unreported_end_is_found_when_nothing_is_left_to_run() -> None:
    """For engines that release a request's memory later, in another thread."""
    scheduler = SimpleNamespace(waiting=[], running=[], kv_cache=None, has_work=False)
    found = scheduler_of(scheduler=scheduler)
    req = found.decoding("one")
    found.loop.found["release_request"].enter((req,), {})  # of another request: this engine reports releases
    for number in (1, 2, 3):
        found.loop.step(decodes(req, number=number), ending(req, "stop" if number == 3 else None))
    found.loop.found["receive_messages"].enter((scheduler,), {})
    (decode,) = found.recorder.named("decode")
    assert decode.values[1] == "stop"


def test_how_a_request_ended_follows_its_engines_reason() -> None:
    outcomes = {"client_closed": Outcome.ABORTED, "broken": Outcome.FAILED}
    found = scheduler_of(dataclasses.replace(EMBEDDED, outcomes={**EMBEDDED.outcomes, **outcomes}))
    for reason in ("length", "abort", *outcomes):
        req = found.decoding(reason)
        found.loop.step(decodes(req), ending(req, reason))
    assert {decode.values[1]: decode.error for decode in found.recorder.named("decode")} == {
        "length": "",
        "abort": "abort",
        "client_closed": "abort",
        "broken": "error",
    }


RELEASES = {**EMBEDDED.roles, "release_request": Role(("engine:release",), ("req",))}


@pytest.mark.parametrize("is_first_token", [True, False])
def test_a_request_ends_when_the_engine_lets_go_of_it(is_first_token: bool) -> None:
    """Its caller has the answer before the result is processed."""
    found = scheduler_of(dataclasses.replace(EMBEDDED, roles=RELEASES))
    req, request = found.queued("one")
    requests, answered_ns = found.trackers.requests, 0
    if is_first_token:
        requests.launched(request, 1)
    else:
        requests.resume(request, 1)

    def release(step: Any) -> None:
        nonlocal answered_ns
        if is_first_token:
            step.prefill = [Chunk(req, request, 1, 1, True)]
            requests.processing(step.prefill)
        req.reason = "stop"
        found.loop.found["release_request"].enter((req,), {})
        answered_ns = time.monotonic_ns()

    found.loop.step(decodes(req), release)
    (decode,) = found.recorder.named("decode")
    assert decode.end_ns <= answered_ns
    assert all(prefill.end_ns <= answered_ns for prefill in found.recorder.named("prefill"))


def test_a_request_with_the_id_of_one_that_has_ended_is_another() -> None:
    found = scheduler_of()
    requests = found.trackers.requests.requests
    for _ in range(2):
        req = found.decoding("again")

        def release(step: Any) -> None:
            assert [*requests] == ["again"]
            req.reason = "stop"  # noqa: B023
            found.loop.found["release_request"].enter((req,), {})  # noqa: B023

        found.loop.found["release_request"].enter((req,), {})
        found.loop.step(decodes(req), release)
        assert not requests
    assert [decode.values[1] for decode in found.recorder.named("decode")] == ["stop", "stop"]


def test_the_steps_of_a_forked_child_have_ids_of_their_own() -> None:
    """A recorder has another file after a fork; a child that counted on would repeat the parent's ids."""
    found = scheduler_of()
    recorder = found.recorder
    for _ in range(3):
        found.loop.step(decodes())
    recorder.steps.retire()
    recorder.steps = OpenSteps.in_memory()
    recorder.level, recorder.sample = 3, SAMPLE_ALL
    for _ in range(3):
        found.loop.step(decodes())
    ids = [span.span_id for span in recorder.named("scheduler.step")]
    assert len({*ids}) == 6
    assert abs(ids[3] - ids[2]) > 1000
