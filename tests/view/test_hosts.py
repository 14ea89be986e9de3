"""Spans of several hosts together: their clocks, the page and the timeline."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.analysis.clocks import align
from sgl_aspects.analysis.sources import load_runs
from sgl_aspects.analysis.spans import Span
from sgl_aspects.cli.main import main
from sgl_aspects.view.payload import payload_of

MS = 1_000_000
ROOM = 200 * MS


def request(number: int, ahead_ns: int) -> list[Span]:
    """One request on a prefill and a decode server, whose clock is ahead by ``ahead_ns``."""
    luck, at, trace = random.Random(number), number * ROOM, f"{number + 1:032x}"
    took = [luck.randint(1, 10) * MS for _ in range(3)]
    met, fed, sent = at + took[0], at + took[0] + took[1], at + sum(took)

    def span(host: str, name: str, start: int, end: int, parent: str = "") -> Span:
        shift = ahead_ns if host == "decode" else 0
        ids = trace, f"{number:08x}{zlib.crc32(f'{host} {name}'.encode()):08x}", parent
        return Span(name, *ids, name == "chat m", start + shift, end + shift, {}, (), 7, host=host, role=host)

    first = span("prefill", "chat m", at, sent)
    return [
        first,
        span("prefill", "prefill", met, fed),
        span("prefill", "kv_transfer", fed, sent),
        span("decode", "chat m", at + MS // 2, at + 100 * MS, first.span_id),
        span("decode", "kv_transfer", met - MS, sent + MS),
        span("decode", "decode", sent + 2 * MS, at + 99 * MS),
    ]


def run(ahead_ns: int, requests: int = 50) -> list[Span]:
    return [span for number in range(requests) for span in request(number, ahead_ns)]


@pytest.mark.parametrize("ahead_ms", [-500, -3, 0, 3, 500])
def test_clocks_are_bounded_by_the_order_of_what_requests_did(ahead_ms: int) -> None:
    spans, (clock,) = align(run(ahead_ms * MS))
    assert {clock.host, clock.reference} == {"prefill", "decode"}
    ahead = ahead_ms / 1e3 if clock.host == "decode" else -ahead_ms / 1e3
    assert clock.low <= ahead <= clock.high
    assert clock.high - clock.low < 0.005
    # No further than it must be, and then everything is in order.
    assert (clock.shift == 0) == (clock.low <= 0 <= clock.high)
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    for span in spans:
        parent = by_id.get((span.trace_id, span.parent_id))
        assert parent is None or parent.start_ns <= span.start_ns


def test_hosts_that_no_request_joins_stay_as_they_are() -> None:
    spans = [Span("a", "1", "1", "", True, 5, 6, {}, (), host=host) for host in ("one", "two")]
    found, (clock,) = align(spans)
    assert found == spans
    assert "no request compares its clock" in str(clock)


def message(spans: list[Span], host: str) -> dict[str, Any]:
    def attribute(key: str, value: str) -> dict[str, Any]:
        return {"key": key, "value": {"stringValue": value}}

    resource = [attribute("host.name", host), attribute("sgl_aspects.disaggregation.mode", host)]
    resource.append({"key": "process.pid", "value": {"intValue": "7"}})
    written = [
        {
            "name": span.name,
            "traceId": span.trace_id,
            "spanId": span.span_id,
            "parentSpanId": span.parent_id,
            "kind": 2 if span.is_server else 1,
            "startTimeUnixNano": str(span.start_ns + 10**18),
            "endTimeUnixNano": str(span.end_ns + 10**18),
        }
        for span in spans
        if span.host == host
    ]
    return {"resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": [{"spans": written}]}]}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """One file of each host, of one run."""
    spans, names = run(40 * MS), []
    for host in ("prefill", "decode"):
        names.append(str(tmp_path / f"{host}.jsonl"))
        Path(names[-1]).write_text(json.dumps(message(spans, host)) + "\n")
    return names


def test_a_page_of_several_hosts(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["report", *files, "-o", str(page)]) == 0
    said = capsys.readouterr().out
    assert "100 requests, 300 spans" in said
    assert "its times are shown" in said
    assert page.stat().st_size > 10_000


def test_a_timeline_of_several_hosts(files: list[str], tmp_path: Path) -> None:
    """Processes of the same number on two hosts are two, and those of a host follow one another."""
    timeline = tmp_path / "timeline.json"
    assert main(["report", *files, "--format", "perfetto", "-o", str(timeline)]) == 0
    events = json.loads(timeline.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(name.split(":")[0] for name in names.values()) == ["decode", "prefill"]
    assert all(name.endswith(" 7") for name in names.values())
    places = {
        event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"
    }
    assert sorted(places) == sorted(names)
    assert len(set(places.values())) == 2


def test_processes_of_two_containers_with_one_id_are_two(tmp_path: Path) -> None:
    """Containers that share the network have the host's name, and often the same process ids."""
    names: list[str] = []
    for run_id in ("first", "second"):
        written = json.dumps(message(run(0, 1), "prefill")).replace('"0000', f'"{len(names)}000')
        named = {"key": "service.instance.id", "value": {"stringValue": run_id}}
        names.append(str(tmp_path / f"{run_id}.jsonl"))
        begin = '"attributes": ['
        Path(names[-1]).write_text(written.replace(begin, f"{begin}{json.dumps(named)}, ", 1) + "\n")
    assert payload_of(load_runs(names))["process"] == [7, "7 (2)"] * 3
    timeline = tmp_path / "timeline.json"
    assert main(["report", *names, "--format", "perfetto", "-o", str(timeline)]) == 0
    events = json.loads(timeline.read_text())["traceEvents"]
    assert len({event["pid"] for event in events}) == 2


def test_a_timeline_of_a_process_whose_number_is_none(tmp_path: Path) -> None:
    """A file may come from anybody."""
    told = json.dumps(message(run(0), "decode")).replace('{"intValue": "7"}', '{"boolValue": true}')
    file, timeline = tmp_path / "spans.jsonl", tmp_path / "timeline.json"
    file.write_text(told + "\n")
    assert main(["report", str(file), "--format", "perfetto", "-o", str(timeline)]) == 0
    assert {event["pid"] for event in json.loads(timeline.read_text())["traceEvents"]} == {0}
