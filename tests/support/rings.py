"""Rings: every kind of record written, and everything read."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import Record, RequestBegin, RequestSeen, RequestSent, SpanType
from sgl_aspects.tracing.schema import REQUEST
from tests.support import workers

STEP = SpanType("step", {"mode": str, "size": int, "usage": float, "last": bool, "none": int})
PLAIN = SpanType("plain", {"number": int})
TEXT = SpanType("text", {"text": str})
LIST = SpanType("list", {"list": list})
# For 64 bits: no backend has room for it, so that it is read as a text.
TOO_LARGE = 1 << 70


def poll(reader: RunReader) -> Iterator[tuple[RingReader, Record]]:
    """Read what was written since the last call, and give the slots back to their writers."""
    for writer, records in reader.poll_rings():
        writer.commit(writer.taken)
        for record in records:
            yield writer, record


def read_all(reader: RunReader) -> list[Record]:
    """Everything that can be read now, in the order of each ring."""
    found = [record for _, record in poll(reader)]
    while reader.has_more:
        found += [record for _, record in poll(reader)]
    return found


def record_everything(recorder: RingRecorder) -> None:
    """Every kind of record, small and large."""
    attributes: Any = {"text": "é" * 600, "list": ["a", "b"], "number": 7, "share": 0.25, "yes": True}
    recorder.write(
        RequestBegin(11, "rid-1", 5, *TraceContext(1 << 100, 3, True, "v=1", True), "chat m", attributes)
    )
    recorder.write(RequestSent(11))
    ids: Any = {"gen_ai.request.id": "é-2", "http.request.header.x-request-id": ["a-7"], "stop": ["b", "c"]}
    for _ in range(2):
        origin = TraceContext(1 << 127, (1 << 64) - 1, True, "", False)
        recorder.write(RequestBegin(22, "é-2", 5, *origin, "chat m", ids))
        recorder.spans(REQUEST)(22, 22, 0, 5, 6, ["é-2", ["stop"], 0.5, None, 7, *[None] * 5], "abort")
    recorder.write(RequestSeen(23, "x" * 300, 6))
    recorder.write(RequestSeen(12, "rid-1", 6))
    recorder.announce(PLAIN, 13, 12, 12, 7)
    for _ in range(3):  # a text is defined when it comes again
        recorder.spans(STEP)(14, 14, 0, 8, 9, ["decode", -5, 0.125, True, None], links=[11, 12])
    recorder.spans(STEP)(15, 14, 14, 10, 11, ["extend", 1 << 62, -1e300, False, None], "ValueError")
    recorder.spans(STEP)(16, 14, 14, 10, 11, ["extend", TOO_LARGE, 0.0, False, None], "ValueError")
    recorder.spans(PLAIN)(17, 17, 0, 12, 13, [1], links=list(range(100, 200)))
    wide = SpanType("wide", {f"a{n}": int for n in range(40)})
    recorder.spans(wide)(18, 17, 17, 14, 15, list(range(40)))
    recorder.spans(LIST)(19, 17, 17, 16, 17, [["stop"]])
    recorder.spans(SpanType("none"))(20, 17, 17, 18, 19)
    recorder.spans(PLAIN)(21, 17, 17, 18, 19, [TOO_LARGE])
    recorder.spans(TEXT)((1 << 64) - 1, 17, 17, 18, 19, ["x" * 5000])


def written_until_killed(folder: str, seconds: float) -> int:
    """Kill a process this long after its first span, and return how many it has reported as written."""
    counters, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        workers.record_until_killed(folder, theirs)
    os.close(theirs)
    data = os.read(counters, 8)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while piece := os.read(counters, 1 << 16):
        data += piece
    os.close(counters)
    whole = len(data) // 8 * 8
    return int.from_bytes(data[whole - 8 : whole], "little")
