"""Requests in a ring: of any kind and size, and always whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.record import format as ring_format
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import RequestBegin, RequestSeen, SpanEnd
from sgl_aspects.tracing.schema import HEADER_REQUEST_ID, REQUEST, REQUEST_ID
from tests.support.rings import TOO_LARGE, read_all

ORIGIN = TraceContext((1 << 127) + 5, (1 << 64) - 1, True, "", True)
ASKED: dict[str, Any] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.request.max_tokens": 256,
    "gen_ai.request.temperature": -0.0,
    "gen_ai.request.stream": False,
    "gen_ai.request.stop_sequences": ["\n", "é"],
}
ODD_IDS = ["", "\0", "a\0b", "x" * 300, "é" * 150, "\ud800", "日本" * 100, "😀" * 61]


def request(rid: str, attributes: dict[str, Any], origin: TraceContext = ORIGIN) -> RequestBegin:
    return RequestBegin(9, rid, 5, *origin, "chat m", attributes)


def written(folder: Path, *records: Any) -> list[Any]:
    """What is read of records that are written three times."""
    (folder / "clock").write_text("0")  # so that times are read as they are written
    recorder = RingRecorder(str(folder))
    for each in records * 3:
        if isinstance(each, (RequestBegin, RequestSeen)):
            recorder.write(each)
        else:
            recorder.spans(REQUEST)(9, 9, 0, 5, 6, each)
    reader = RunReader(str(folder))
    found: list[Any] = read_all(reader)
    assert reader.damaged == 0
    recorder.close()
    reader.close()
    assert len(found) == 3 * len(records)
    return found


def test_requests_arrive_as_they_were_written(tmp_path: Path) -> None:
    plain = request("r-1", {**ASKED, REQUEST_ID: "r-1", HEADER_REQUEST_ID: ["é-7"]})
    others = [
        request("r-2", {REQUEST_ID: "another", "n": 2}, ORIGIN._replace(sampled=False)),
        request("r-3", {}, TraceContext(1)),
        request("r-4", {REQUEST_ID: "r-4"}, ORIGIN._replace(state="v=1,w=2")),
    ]
    seen = RequestSeen((1 << 64) - 1, "é" * 111, 6)
    end = ["chatcmpl-r", ["stop", "length"], 0.5, 412, None, 256, 0.031, 1.5, None, 500]
    found = written(tmp_path, plain, *others, seen, end)
    assert found[:5] == found[-6:-1] == [plain, *others, seen]
    assert [type(each) for each in found[0].attributes.values()] == [
        type(each) for each in plain.attributes.values()
    ]
    ends = [each for each in found if isinstance(each, SpanEnd)]
    assert [each.values for each in ends] == [end] * 3


@pytest.mark.parametrize("rid", ODD_IDS)
def test_an_odd_id_arrives_whole(tmp_path: Path, rid: str) -> None:
    begin = request(rid, {**ASKED, REQUEST_ID: rid, HEADER_REQUEST_ID: [rid]})
    plain = request(rid, {"gen_ai.operation.name": "chat"})  # without an attribute of the id
    found = written(tmp_path, begin, RequestSeen(3, rid, 6), [rid, [rid], *[None] * 8], plain)
    for start in range(0, 12, 4):
        began, seen, ended, without = found[start : start + 4]
        assert without == plain
        # Two processes name a request by its id: it is the same in both, whatever it is.
        assert began.request_id == seen.request_id == rid
        assert began.attributes == {**ASKED, REQUEST_ID: rid, HEADER_REQUEST_ID: [rid]}
        assert ended.values == [rid, [rid], *[None] * 8]


@pytest.mark.parametrize(
    "value", [TOO_LARGE, None, [], ["a", 1], [1, 2], [None], ["x" * 300], ("a", "b"), "y" * 5000, "\ud800"]
)
def test_an_attribute_of_any_kind_arrives(tmp_path: Path, value: Any) -> None:
    begin = request("r", {**ASKED, REQUEST_ID: "r", HEADER_REQUEST_ID: value, "other": value})
    for began in written(tmp_path, begin):
        shown = [*value] if isinstance(value, tuple) else value
        more = {} if value is None else {HEADER_REQUEST_ID: shown, "other": shown}
        assert began.attributes == {**ASKED, REQUEST_ID: "r", **more}


def test_more_attributes_than_a_slot_has_room_for(tmp_path: Path) -> None:
    begin = request("r", {REQUEST_ID: "r", **{f"a{number}": number for number in range(30)}})
    assert written(tmp_path, begin) == [begin] * 3


@pytest.mark.parametrize(
    "damage",
    [
        {249: 1},  # its mark: it was never finished
        {0: 99},  # its kind
        {2: 1},  # a part of another record
        {4: 0},  # of no parts
        {8: 5},  # its length
        {12: 99},  # its checksum
        {24: 0xFF},  # its content
        {60: 0xFF, 80: 0},
    ],
)
def test_a_torn_request_costs_no_other(tmp_path: Path, damage: dict[int, int]) -> None:
    recorder = RingRecorder(str(tmp_path))
    origin = TraceContext(1 << 64)
    for number in range(6):
        recorder.write(request(f"r{number}", {REQUEST_ID: f"r{number}"}, origin))
    recorder.close()
    (path,) = tmp_path.glob("*.ring")
    with path.open("r+b") as file:
        for offset, byte in damage.items():
            file.seek(ring_format.SLOTS_OFFSET + 5 * ring_format.SLOT_BYTES + offset)
            file.write(bytes([byte]))
    reader = RunReader(str(tmp_path))
    found = [record.request_id for record in read_all(reader) if isinstance(record, RequestBegin)]
    assert found == ["r0", "r1", "r2", "r3", "r5"]
    assert reader.damaged == 1
    reader.close()


def test_requests_of_a_killed_process(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        recorder = RingRecorder(str(tmp_path))
        for number in range(1000):
            recorder.write(request(f"r{number}", {**ASKED, REQUEST_ID: f"r{number}"}))
            recorder.write(RequestSeen(number + 1, f"r{number}", 6))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    reader = RunReader(str(tmp_path))
    found: list[Any] = read_all(reader)
    assert [record.request_id for record in found] == [f"r{number // 2}" for number in range(2000)]
    assert reader.damaged == 0
    reader.close()
