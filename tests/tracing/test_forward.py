"""Forward spans and the device's clock: what is timed of an eager pass, and of one that is replayed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sgl_aspects as aspects
from sgl_aspects.engines import EMBEDDED, SGLANG
from sgl_aspects.platforms import DeviceGraph
from sgl_aspects.runtime.scheduling.batch import ForwardMode
from sgl_aspects.tracing.aspects.forward import ForwardAspect
from sgl_aspects.tracing.aspects.scheduled import SchedulerState
from sgl_aspects.tracing.collector.run_reader import RunReader
from sgl_aspects.tracing.records import SpanEnd
from sgl_aspects.tracing.ring.recorder import RingRecorder
from tests.support import stand_ins


class Clock:
    """A device whose time passes when it is told so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.recorded = 0

    def is_capturing(self) -> bool:
        return False

    def create_event(self) -> Any:
        event = SimpleNamespace(at=-1.0)

        def record() -> None:
            event.at = self.now
            self.recorded += 1

        event.record = record
        event.query = lambda: event.at >= 0
        event.elapsed_ms = lambda end: (end.at - event.at) * 1e3
        return event


class Graph(DeviceGraph):
    """Takes two seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def capture(self, work: Any) -> Any:
        return work()

    def replay(self) -> None:
        self.clock.now += 2.0


def test_what_the_host_prepares_for_a_replay_is_no_device_time(tmp_path: Path) -> None:
    recorder, clock = RingRecorder(str(tmp_path)), Clock()
    state = SchedulerState(recorder)
    state.level, state.step_id = 3, recorder.new_id()
    found = {each.role: each for each in ForwardAspect(recorder, EMBEDDED, state).observations()}
    launch = aspects.Advice(
        aspects.Target.parse(EMBEDDED.roles["graph_launch"].targets),
        aspects.HookType.OBSERVE,
        found["graph_launch"],
    )
    runner = SimpleNamespace(platform=clock, graph_runner=object())
    batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=1, num_tokens=1)
    recorded: list[int] = []
    with aspects.woven(launch):
        for is_replayed in (False, True, True, None, False, "off"):
            if is_replayed == "off":
                runner.graph_runner, is_replayed = None, None
            token = found["forward"].enter((runner, batch), {})
            if is_replayed is not None:  # None: another kind of graph runner, which does not ask so
                decide = found["graph_decision"]
                decide.exit(decide.enter((None, batch), {}), is_replayed, None)
            clock.now += 1.0  # launching one by one, or preparing a replay
            if is_replayed:
                found["graph_replay"].enter((None, batch), {})
                Graph(clock).replay()
            found["forward"].exit(token, None, None)
            recorded.append(clock.recorded)
        Graph(clock).replay()  # somebody's, outside any pass
    reader = RunReader(str(tmp_path))
    spans = [record for _, record in reader.poll() if isinstance(record, SpanEnd)]
    values = [dict(zip(span.type.attributes, span.values)) for span in spans]
    labels = [each["sgl_aspects.forward.graph"] for each in values]
    assert labels == ["eager", "replayed", "replayed", "eager", "eager", "eager"]
    assert [each["sgl_aspects.forward.device_time"] for each in values] == [1.0, 2.0, 2.0, None, 1.0, 1.0]
    # The first pass enters before it is known that it asks for a graph.
    assert [after - before for before, after in zip([0, *recorded], recorded)] == [3, 2, 2, 0, 3, 2]
    recorder.close()
    reader.close()


class Module:
    """What an extension of torch adds as ``torch.<its device>``: work goes to a queue, time passes there."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0.0  # how far the device has come
        self.waited = 0

    def is_current_stream_capturing(self) -> bool:
        return False

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802
        assert enable_timing
        event = SimpleNamespace(at=-1.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.query = lambda: self.done >= event.at
        event.synchronize = lambda: setattr(self, "waited", self.waited + 1)
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event


def test_sglangs_forward_has_the_time_of_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever torch knows, also in an extension of somebody else's; with the batch's result, unwaited."""
    device = Module()
    monkeypatch.setattr(torch, "somebodys", device, raising=False)
    recorder = RingRecorder(str(tmp_path))
    state = SchedulerState(recorder)
    state.level, state.step_id = 3, recorder.new_id()
    found = {each.role: each for each in ForwardAspect(recorder, SGLANG, state).observations()}
    runner = SimpleNamespace(device="somebodys:0")
    reader = RunReader(str(tmp_path))

    def spans() -> list[tuple[Any, ...]]:
        records = [record for _, record in reader.poll() if isinstance(record, SpanEnd)]
        return [tuple(record.values) for record in records]

    for seconds in (1.0, 2.0):  # two are launched before the first one's result is processed
        batch = SimpleNamespace(forward_mode=stand_ins.ForwardMode.DECODE, batch_size=3)
        token = found["forward"].enter((runner, batch), {})
        device.now += seconds
        found["forward"].exit(token, None, None)
    assert spans() == []
    process = found["process_batch_result"]
    for device.done in (1.0, 3.0):
        process.exit(process.enter((None, None, None), {}), None, None)
    values = [("decode", 3, 3, "somebodys", seconds, "eager") for seconds in (1.0, 2.0)]
    assert spans() == values
    assert device.waited == 0
    recorder.close()
    reader.close()


@pytest.mark.parametrize(("device", "name"), [("cpu", "cpu"), ("nobodys:1", None)])
def test_sglangs_device_is_one_of_ours_where_there_is_one(device: str, name: str | None) -> None:
    platform = SGLANG.reader("model_runner.platform")(
        SimpleNamespace(device=torch.device(device) if name else device)
    )
    assert getattr(platform, "device_name", None) == name
