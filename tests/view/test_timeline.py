"""Timelines for Perfetto, checked against the trace event format, with what an engine really did."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags

from sgl_aspects.tracing import attach
from sgl_aspects.tracing.context import root_of_trace_id, trace_id_of_root
from sgl_aspects.tracing.export.chrome_trace import Timeline

pytestmark = pytest.mark.usefixtures("forked_schedulers")

Event = dict[str, Any]


def check_format(events: list[Event]) -> None:
    """Check the trace event format: fields, names, slices that nest, flows that begin."""
    named = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    flows: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        assert event["ph"] in "XMC"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert ("thread_name", event["pid"], event["tid"]) in named
            assert ("process_name", event["pid"], 0) in named
            tracks[event["pid"], event["tid"]].append(event)
        if event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        if "bind_id" in event:
            assert 0 < int(event["bind_id"], 16) < 1 << 63
            flows[event["bind_id"]].append(event)
    for track in tracks.values():
        open_until: list[float] = []
        for event in sorted(track, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert not open_until or event["ts"] + event["dur"] <= open_until[-1], event
            open_until.append(event["ts"] + event["dur"])
    for flow in flows.values():
        flow.sort(key=lambda event: (event["ts"], -event["dur"]))
        assert [bool(event.get("flow_in")) for event in flow] == [False] + [True] * (len(flow) - 1)
        assert all(event["flow_out"] for event in flow)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    from sgl_aspects.runtime import Engine, SamplingParams
    from tests.support.tiny_models import make_llama

    folder = tmp_path_factory.mktemp("model")
    make_llama(folder)
    file = folder / "trace.json"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SGL_ASPECTS_TRACE_PERFETTO_FILE", str(file))
        with attach(level=4, exporters=["perfetto"]), Engine(model_path=folder) as engine:
            sampling = SamplingParams(max_new_tokens=6, temperature=0.0)
            for handle in [engine.submit(f"the quick brown fox {number}", sampling) for number in range(4)]:
                assert list(handle)
    return list(json.loads(file.read_text()))


def test_the_format(events: list[Event]) -> None:
    check_format(events)


def test_requests_flow_from_process_to_process(events: list[Event]) -> None:
    flows: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if "bind_id" in event:
            flows[event["bind_id"]].append(event)
    assert len(flows) == 4
    for flow in flows.values():
        names = {event["name"]: event["pid"] for event in flow}
        assert {"queue", "prefill", "decode", "tokenize"} < set(names)
        assert names["queue"] == names["decode"] != names["tokenize"]


def test_processes_and_tracks_have_names(events: list[Event]) -> None:
    names = {
        (event["pid"], event["args"]["name"].split()[0])
        for event in events
        if event["name"] == "process_name"
    }
    assert sorted(name for _, name in names) == ["requests", "scheduler"]
    threads = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert "steps" in threads
    assert any(name.startswith("device ") for name in threads)
    assert len([name for name in threads if name.startswith("request ")]) == 8  # in each process


def test_device_time_and_counters(events: list[Event]) -> None:
    forwards = [event for event in events if event["ph"] == "X" and event["name"] == "forward"]
    device = sorted((event for event in events if event.get("cat") == "device"), key=lambda e: e["ts"])
    assert len(device) == len(forwards) > 5
    told = sum(event["args"]["sgl_aspects.forward.device_time"] for event in forwards)
    assert sum(event["dur"] for event in device) == pytest.approx(told * 1e6, rel=0.01)
    for before, after in pairwise(device):
        assert before["ts"] + before["dur"] <= after["ts"] + 1
    steps = [event for event in events if event["ph"] == "X" and event["name"] == "scheduler.step"]
    counters = [event for event in events if event["ph"] == "C"]
    assert len(counters) == 3 * len(steps)
    assert max(event["args"]["requests"] for event in counters if event["name"] == "batch") <= 4
    assert {event["name"] for event in counters} == {"batch", "queue", "KV cache"}


def span(trace: int, span_id: int, start: int, end: int, *, parent: int = 0, name: str = "x") -> ReadableSpan:
    flags = TraceFlags(TraceFlags.SAMPLED)
    return ReadableSpan(
        name=name,
        context=SpanContext(trace, span_id, False, flags),
        parent=SpanContext(trace, parent, False, flags) if parent else None,
        resource=Resource({"process.pid": 7}),
        start_time=start * 1000,
        end_time=end * 1000,
    )


@pytest.mark.parametrize("by_start", [True, False])
def test_steps_that_overlap_have_tracks_of_their_own(by_start: bool) -> None:
    spans = []
    for number in range(20):
        root, start = 100 + 2 * number, 10 * number
        trace = trace_id_of_root(root)
        spans.append(span(trace, root, start, start + 15, name="scheduler.step"))
        spans.append(span(trace, root + 1, start, start + 5, parent=root, name="schedule"))
    spans.sort(key=lambda span: (span.start_time or 0, span.parent is not None))
    if not by_start:  # as a collector has them: those below a step come before it
        spans.sort(key=lambda span: (span.end_time or 0, span.parent is None))
    events = list(Timeline().events_of(spans))
    check_format(events)
    assert len({event["tid"] for event in events if event["ph"] == "X"}) <= 3


def test_the_root_of_a_trace_that_no_request_brought() -> None:
    for root in (1, 12345, (1 << 64) - 1):
        assert root_of_trace_id(trace_id_of_root(root)) == root
    assert root_of_trace_id(0x4BF92F3577B34DA6A3CE929D0E0E4736) == 0
