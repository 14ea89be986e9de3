"""The ring: what writers record is what readers read, whatever happens to the writers and to the file."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.record import file as ring_file
from sgl_aspects.tracing.record import format as ring_format
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import (
    Record,
    RequestBegin,
    RequestSeen,
    RequestSent,
    SpanBegin,
    SpanEnd,
    SpanType,
)
from sgl_aspects.tracing.schema import REQUEST
from tests.support import workers
from tests.support.joined import Joined
from tests.support.ring_page_reader import read_page
from tests.support.rings import (
    PLAIN,
    TOO_LARGE,
    poll,
    read_all,
    record_everything,
    written_until_killed,
)

spawn = multiprocessing.get_context("spawn")


def comparable(record: Record) -> tuple[Any, ...]:
    """Our reader's record in the words of the page's reader."""
    name = {
        SpanEnd: "span",
        SpanBegin: "begin",
        RequestSent: "sent",
        RequestSeen: "seen",
        RequestBegin: "received",
    }[type(record)]
    fields: list[Any] = []
    for field in record:
        if isinstance(field, SpanType):
            fields += [field.name, [*field.attributes]]
        else:
            fields.append([*field] if isinstance(field, tuple) else field)
    return (name, *fields)


def test_a_reader_written_from_the_page_agrees(tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path))
    record_everything(recorder)
    reader = RunReader(str(tmp_path))
    ours = read_all(reader)
    (path,) = tmp_path.glob("*.ring")
    page = read_page(path)
    assert [comparable(record) for record in ours] == page["records"]
    assert page["pid"] == os.getpid()
    assert (page["dropped"], reader.damaged) == (0, 0)
    assert len(ours) == 20
    spans = {record.span_id: record for record in ours if isinstance(record, SpanEnd)}
    assert spans[14].values == ["decode", -5, 0.125, True, None]
    assert spans[14].links == [11, 12]
    assert (spans[15].error, spans[15].values[:3]) == ("ValueError", ["extend", 1 << 62, -1e300])
    assert (spans[16].error, spans[16].values[1]) == ("ValueError", TOO_LARGE)
    assert spans[17].links == list(range(100, 200))
    assert spans[18].values == list(range(40))
    assert spans[19].values == [["stop"]]
    assert spans[21].values == [TOO_LARGE]
    assert spans[(1 << 64) - 1].values == ["x" * 5000]
    recorder.close()
    reader.close()


def test_attributes_whose_type_comes_with_the_value(tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path))
    write = recorder.spans(SpanType("any", {"first": object, "second": object}))
    values: list[Any] = [["a", 1], [2, 2.5], [True, None], [None, [1]], [1, 2], [1.5, 2]]
    values += [["b", TOO_LARGE], [3], []]
    for number in range(20):  # more choices than there are writers for
        for each in values:
            write(number + 1, 1, 1, 1, 2, each)
    reader = RunReader(str(tmp_path))
    found = [record.values for record in read_all(reader) if isinstance(record, SpanEnd)]
    found = [[value for value in each if value is not None] for each in found]
    assert found == [[value for value in each if value is not None] for each in values] * 20
    assert [type(value) for each in found[4:6] for value in each] == [int, int, float, int]
    assert reader.damaged == 0
    reader.close()
    recorder.close()


def test_definitions_that_are_full_are_counted(tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path))
    for number in range(2000):
        recorder.spans(SpanType(f"{number}" + "x" * 150))(number + 1, 1, 1, 1, 2)
    reader = RunReader(str(tmp_path))
    names = [record.type.name for record in read_all(reader) if isinstance(record, SpanEnd)]
    assert names == [f"{number}" + "x" * 150 for number in range(len(names))]
    assert len(names) > 1000
    assert len(names) + reader.dropped == 2000
    reader.close()
    recorder.close()


def test_a_run_that_has_gone_is_recorded_until_the_ring_is_full(tmp_path: Path) -> None:
    """As after a collector that could not start: every further step would look for a slot in vain."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    recorder = RingRecorder(str(folder), level=3)
    write = recorder.spans(PLAIN)
    write(1, 1, 1, 1, 2, [0])
    shutil.rmtree(folder)
    for number in range(2, ring_format.SLOTS + 2):
        write(number, 1, 1, 1, 2, [number])
    assert recorder.level == 0
    assert not recorder.open()


def test_kills_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every span that was finished, and each once; none that was not, and none in pieces."""
    monkeypatch.setattr(ring_format, "SLOTS", 1 << 13)
    chance = random.Random(1)
    totals: Counter[str] = Counter()
    for number in range(400):
        if number >= 40 and totals["open"] > 3:
            break
        folder = tmp_path / str(number)
        folder.mkdir()
        finished = written_until_killed(str(folder), chance.random() * 0.004)
        reader = RunReader(str(folder))
        records = read_all(reader)
        ended = [record for record in records if isinstance(record, SpanEnd)]
        begun = [record for record in records if isinstance(record, SpanBegin)]
        ids = [record.span_id for record in ended]
        # It reports each after writing it: the last one may be finished but not yet reported.
        assert ids == list(range(1, len(ids) + 1))
        assert len(ids) >= finished
        for record in ended:
            assert (
                record.values
                == [record.span_id, record.span_id / 2, "decode", [record.span_id]][: len(record.values)]
            )
            assert record.end_ns == record.start_ns + record.span_id
        assert len(begun) in (len(ended), len(ended) + 1)
        assert reader.damaged == 0 or len(records) > 0
        totals["finished"] += len(ended)
        totals["open"] += len(begun) - len(ended)
        totals["damaged"] += reader.damaged
        reader.close()
    assert totals["finished"] > 1000
    assert totals["open"] > 3  # many were hit in the middle of a span
    assert totals["damaged"] == 0


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_four_writers_are_all_accounted_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = 25_000
    recorder = RingRecorder(str(tmp_path))

    def write(first: int) -> None:
        for number in range(first + 1, first + each + 1):
            recorder.spans(PLAIN)(number, 1, 1, 1, 2, [number])

    writers: list[Any]
    if kind == "threads":
        # A process cannot query its own lock: to this reader the writer would be dead.
        monkeypatch.setattr(RingReader, "is_alive", lambda self: True)
        writers = [threading.Thread(target=write, args=(number * each,)) for number in range(4)]
    else:
        start = multiprocessing.get_context("fork").Process
        arguments = [(str(tmp_path), number * each, each) for number in range(4)]
        writers = [start(target=workers.record_spans, args=words) for words in arguments]
    for writer in writers:
        writer.start()
    reader = RunReader(str(tmp_path))
    seen: list[int] = []
    while any(writer.is_alive() for writer in writers) or reader.has_more:
        seen += [record.span_id for _, record in poll(reader) if isinstance(record, SpanEnd)]
    seen += [record.span_id for record in read_all(reader) if isinstance(record, SpanEnd)]
    assert len(seen) == len(set(seen))
    assert len(seen) + reader.dropped == 4 * each
    assert reader.damaged == 0
    assert len(reader.writers) == (1 if kind == "threads" else 4)
    for number in range(4):  # in the order of its writer
        own = [span for span in seen if (span - 1) // each == number]
        assert own == sorted(own)
    recorder.close()
    reader.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_ring_is_smaller_where_memory_is_short(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing to an unreserved page would end the engine with SIGBUS."""
    allocate = os.posix_fallocate

    def short(descriptor: int, offset: int, size: int) -> None:
        if size > 1 << 20:
            raise OSError(number, os.strerror(number))
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", short)
    recorder = RingRecorder(str(tmp_path))
    recorder.spans(PLAIN)(1, 1, 0, 1, 2, [1])
    (path,) = tmp_path.glob("*.ring")
    assert path.stat().st_size == ring_format.SLOTS_OFFSET + 2048 * ring_format.SLOT_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(read_page(path)["records"]) == 1
    recorder.close()


LIMITED = """
import os, resource, sys
from sgl_aspects.tracing.records import SpanType
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
recorder = RingRecorder(sys.argv[1])
recorder.spans(SpanType("x"))(1, 1, 0, 1, 2)
recorder.close()
"""


def test_a_limit_on_the_size_of_files_makes_a_ring_smaller(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LIMITED, str(tmp_path)]
    said = subprocess.run(words, check=True, stderr=subprocess.PIPE, text=True).stderr
    assert "raise ulimit -f" in said
    (path,) = tmp_path.glob("*.ring")
    assert path.stat().st_size < 4 << 20
    assert len(read_page(path)["records"]) == 1


def test_many_processes_leave_the_engine_its_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 64 MiB that a container has by default, and forty processes that each make a ring in it."""
    free = 64 << 20

    def allocate(descriptor: int, offset: int, size: int) -> None:
        nonlocal free
        free -= size
        os.ftruncate(descriptor, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(os, "fstatvfs", lambda _: types.SimpleNamespace(f_bavail=free >> 12, f_frsize=4096))
    for number in range(40):
        folder = tmp_path / str(number)
        folder.mkdir()
        recorder = RingRecorder(str(folder))
        assert recorder.open()
        recorder.close()
    assert free > 16 << 20


def test_no_memory_at_all_stops_tracing_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", none)
    recorder = RingRecorder(str(tmp_path))
    recorder.spans(PLAIN)(1, 1, 0, 1, 2, [1])
    recorder.spans(PLAIN)(2, 1, 0, 1, 2, [1])
    assert [record.message for record in caplog.records] == [
        f"tracing stops in process {os.getpid()}: [Errno 28] No space left on device"
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_ring_with_less_room_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ring_file, "_SHARE", 1 << 40)  # as if next to nothing were free
    RingRecorder(str(tmp_path)).open()
    (record,) = caplog.records
    assert f"room for {ring_format.FEWEST_SLOTS} records in process {os.getpid()}" in record.getMessage()
    assert "shm-size" in record.getMessage()


def test_an_id_used_again_at_once_by_a_later_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began after its schedulers, as SGLang's further HTTP workers, and goes on while rings are read."""
    first, second, caller = (RingRecorder(str(tmp_path)) for _ in range(3))
    for recorder in (first, second, caller):
        recorder.open()
    roots, begun = list[int](), time.monotonic_ns()
    reader, joiner, poll_now = RunReader(str(tmp_path)), Joined(), RingReader.poll

    def request(scheduler: RingRecorder) -> None:
        start = begun + len(roots) * 10_000_000
        if roots:
            caller.spans(REQUEST)(roots[-1], roots[-1], 0, start - 10_000_000, start - 5_000_000)
        roots.append(caller.new_id())
        caller.write(RequestBegin(roots[-1], "same", start, *TraceContext(roots[-1]), "chat m", {}))
        caller.write(RequestSent(roots[-1]))
        key, seen = scheduler.new_id(), start + 2_000_000
        scheduler.write(RequestSeen(key, "same", seen))
        scheduler.spans(SpanType("queue"))(scheduler.new_id(), key, key, seen, seen + 1)

    def read() -> None:
        for writer, records in reader.poll_rings():
            joiner.add(writer, *records)
        joiner.match_waiting()

    request(first)
    read()
    _, its_name, _ = reader.writers

    def poll_late(ring: RingReader, alive: bool = True) -> Any:
        if ring.name == its_name:
            request(second)
        return poll_now(ring, alive)

    monkeypatch.setattr(RingReader, "poll", poll_late)
    read()
    monkeypatch.undo()
    joiner.finish()
    for recorder in (first, second, caller):
        recorder.close()
    reader.close()
    assert [span.parent.span_id for span in joiner.spans if span.name == "queue"] == roots


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
    ],
)
def test_a_torn_record_costs_no_other(tmp_path: Path, damage: dict[int, int]) -> None:
    recorder = RingRecorder(str(tmp_path))
    for number in range(6):
        recorder.write(RequestSeen(number, f"r{number}", 6))
    recorder.close()
    (path,) = tmp_path.glob("*.ring")
    with path.open("r+b") as file:
        for offset, byte in damage.items():
            file.seek(ring_format.SLOTS_OFFSET + 5 * ring_format.SLOT_BYTES + offset)
            file.write(bytes([byte]))
    reader = RunReader(str(tmp_path))
    found = [record.request_id for record in read_all(reader) if isinstance(record, RequestSeen)]
    assert found == ["r0", "r1", "r2", "r3", "r5"]
    assert reader.damaged == 1
    reader.close()


def test_a_ring_of_another_version_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As where the package is replaced while a run lives, and its collector is started again."""
    recorder = RingRecorder(str(tmp_path))
    recorder.write(RequestSeen(1, "r1", 6))
    recorder.close()
    (path,) = tmp_path.glob("*.ring")
    with path.open("r+b") as file:
        file.seek(8 * ring_format.WORD_VERSION)
        file.write(b"\x63")
    reader = RunReader(str(tmp_path))
    assert (reader.find(), reader.damaged) == ([], 1)
    assert f"{path} is not a ring of version {ring_format.VERSION}; what is in it" in capsys.readouterr().err
