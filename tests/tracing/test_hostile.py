"""Damaged ring files: no crash, no hang, valid records are read, and can be exported."""

from __future__ import annotations

import json
import marshal
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from sgl_aspects.tracing.collect import dump
from sgl_aspects.tracing.collect.join import Joiner
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.collect.run_reader import RunReader
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.export.otlp_encoder import SpanEncoder
from sgl_aspects.tracing.export.span import CollectedSpan
from sgl_aspects.tracing.record import format as ring_format
from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.record.codec import DamagedError, Decoder, encode, is_plain
from sgl_aspects.tracing.record.ring_recorder import RingRecorder
from sgl_aspects.tracing.records import RequestBegin, RequestSeen, RequestSent, SpanEnd, SpanType
from tests.support.processes import python
from tests.support.rings import PLAIN, TEXT, poll, read_all, record_everything

SLOTS = 256
GOOD = 150  # of the spans that the good file ends with


@pytest.fixture
def good(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A ring of every kind of record, a joined request, and many plain spans from number 1000 on."""
    monkeypatch.setattr(ring_format, "SLOTS", SLOTS)
    folder = tmp_path_factory.mktemp("good")
    recorder = RingRecorder(str(folder))
    record_everything(recorder)
    recorder.write(RequestBegin(900, "r", 5, *TraceContext(7), "chat m", {"a": 1}))
    recorder.write(RequestSent(900))
    recorder.write(RequestSeen(901, "r", 6))
    recorder.announce(PLAIN, 902, 901, 901, 7)
    recorder.spans(PLAIN)(900, 900, 0, 5, 9, [1])
    for number in range(GOOD):
        recorder.spans(PLAIN)(1000 + number, 1000 + number, 0, 1, 2, [number])
    recorder.close()
    (path,) = folder.glob("*.ring")
    return path.read_bytes()


def export_all(folder: Path) -> list[ReadableSpan]:
    """Reads, joins and encodes what a run folder holds, and dumps it in every format, in seconds of work."""
    started = time.process_time()
    reader = RunReader(str(folder))
    collected: list[CollectedSpan] = []
    joiner = Joiner(Resource({}), collected.append, joins_partial=True)
    found = list(poll(reader))
    while reader.has_more:
        found += poll(reader)
    for writer, record in found:
        joiner.add(writer, record)
    for writer in reader.writers.values():
        joiner.writer_gone(writer)
    joiner.finish()
    spans = [span.readable() for span in collected]
    encode_spans(spans).SerializeToString()
    SpanEncoder().encode(collected)
    reader.close()
    for path in folder.glob("*.ring"):
        try:
            ring = RingReader(path, read_only=True)
        except DamagedError:
            continue
        seen = dump.spans_of([ring], 1e12)
        for form in dump.FORMATS:
            written = dump.write(seen, form)
            if form == "text":
                assert len(written.splitlines()) == len(seen)
            else:
                json.loads(written, parse_constant=_refuse)
        ring.close()
    assert time.process_time() - started < 60
    return spans


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def write_ring(folder: Path, data: bytearray) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "1-0.ring").write_bytes(data)


def _flip_bits(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randrange(1, 60)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _fill(start: int, end: int) -> Callable[[bytearray, random.Random], None]:
    def damage(data: bytearray, chance: random.Random) -> None:
        offset = chance.randrange(start, end)
        size = chance.choice([1, 8, 64, 4096])
        data[offset : offset + size] = chance.choice([bytes(size), b"\xff" * size, chance.randbytes(size)])

    return damage


def _truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def _extend(data: bytearray, chance: random.Random) -> None:
    data += chance.randbytes(chance.randrange(1, 1 << 16))


def _hostile_word(data: bytearray, chance: random.Random) -> None:
    word = chance.choice([*range(9), *range(16, 19), 24])
    value = chance.choice([0, 1, 7, 255, 1 << 20, 1 << 24, 1 << 31, 1 << 62, 1 << 63, (1 << 64) - 1])
    struct.pack_into("<Q", data, word * 8, value)


def _swap_slots(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randrange(1, 20)):
        one, other = (
            ring_format.SLOTS_OFFSET + chance.randrange(SLOTS) * ring_format.SLOT_BYTES for _ in range(2)
        )
        size = ring_format.SLOT_BYTES
        data[one : one + size], data[other : other + size] = (
            data[other : other + size],
            data[one : one + size],
        )


def _hostile_lengths(data: bytearray, chance: random.Random) -> None:
    """In the definitions: lengths of one more, none, too many."""
    offset = ring_format.HEADER_BYTES
    end = offset + int.from_bytes(data[16 * 8 : 16 * 8 + 8], "little")
    while offset + 4 <= min(end, len(data)):  # another damage may be in the lengths already
        (size,) = struct.unpack_from("<I", data, offset)
        if chance.random() < 0.2:
            struct.pack_into("<I", data, offset, chance.choice([0, 1, size + 1, 1 << 20, (1 << 32) - 1]))
        offset += 4 + size


DAMAGES: dict[str, Callable[[bytearray, random.Random], None]] = {
    "bits": _flip_bits,
    "header": _fill(0, 300),
    "definitions": _fill(ring_format.HEADER_BYTES, ring_format.HEADER_BYTES + 1500),
    "slots": _fill(ring_format.SLOTS_OFFSET, ring_format.SLOTS_OFFSET + 200 * ring_format.SLOT_BYTES),
    "truncated": _truncate,
    "extended": _extend,
    "words": _hostile_word,
    "swapped": _swap_slots,
    "lengths": _hostile_lengths,
}


def fuzz(good: bytes, folder: Path, seeds: Iterator[int]) -> int:
    """How many of the good file's plain spans came through, over all seeds."""
    recovered = 0
    for seed in seeds:
        chance = random.Random(seed)
        data = bytearray(good)
        for name in chance.sample(list(DAMAGES), chance.choice([1, 1, 1, 2, 3])):
            if len(data) > ring_format.SLOTS_OFFSET + 200 * ring_format.SLOT_BYTES:
                DAMAGES[name](data, chance)
        write_ring(folder, data)
        spans = export_all(folder)
        recovered += sum(span.name == "plain" for span in spans)
    return recovered


def test_damaged_files(good: bytes, tmp_path: Path) -> None:
    assert fuzz(good, tmp_path / "run", iter(range(40))) > 15 * GOOD


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_damaged_files_by_the_thousand(good: bytes, tmp_path: Path) -> None:
    assert fuzz(good, tmp_path / "run", iter(range(1000, 2000))) > 333 * GOOD


@pytest.mark.parametrize("name", ["slots", "extended", "swapped", "lengths"])
def test_what_is_good_is_recovered(good: bytes, tmp_path: Path, name: str) -> None:
    """One damage at a time; of 150 spans few are touched."""
    for seed in range(4):
        data = bytearray(good)
        DAMAGES[name](data, random.Random(seed))
        write_ring(tmp_path / "run", data)
        plain = [span for span in export_all(tmp_path / "run") if span.name == "plain"]
        least = {"slots": 130, "swapped": 108, "extended": GOOD, "lengths": 0}[name]
        assert len(plain) >= least


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 130) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
_IDS = st.sampled_from([0, 1, 2, 3, (1 << 64) - 1, 1 << 64, -1]) | st.integers(0, 1 << 63)
_TEXTS = st.text(max_size=30) | st.sampled_from(["r1", "\ud800", "a\nb\x1b[31m", "x" * 3000])
_RECORDS = st.one_of(
    st.tuples(
        st.just("request"),
        *(_IDS, _TEXTS, _IDS, st.integers(0, 1 << 129), _IDS, st.booleans(), _TEXTS, st.booleans(), _TEXTS),
        st.dictionaries(_TEXTS, _JSON, max_size=4),
    ),
    st.tuples(st.just("seen"), _IDS, _TEXTS, _IDS),
    st.tuples(
        st.sampled_from([1, 2]),  # the definitions of plain spans and of texts
        *(_IDS, _IDS, _IDS, _IDS, _IDS),
        st.lists(_JSON, max_size=5),
        _TEXTS,
        st.lists(_IDS, max_size=4),
    ),
    st.tuples(_TEXTS | st.sampled_from(["begin", "sent", "elsewhere", "process", "group", 1, -5]), _JSON),
    st.tuples(st.sampled_from(["seen", "begin", 1]), *[_IDS | st.floats()] * 5),
    st.lists(_JSON, max_size=6).map(tuple),
)


@contextmanager
def between_spans_that_are_read(folder: Path) -> Iterator[RingRecorder]:
    """What is written between some spans leaves them and the exporters as they are."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    recorder = RingRecorder(str(folder))
    recorder.spans(PLAIN)(1000, 1000, 0, 1, 2, [1])
    recorder.spans(TEXT)(1002, 1000, 0, 1, 2, ["text"])
    yield recorder
    recorder.spans(PLAIN)(1001, 1001, 0, 1, 2, [1])
    recorder.close()
    assert {1000, 1001} <= {span.context.span_id for span in export_all(folder) if span.context}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(_RECORDS, min_size=1, max_size=12))
@example(records=[("process", {"0": {}})])
def test_records_that_say_anything(tmp_path: Path, records: list[Any]) -> None:
    """Complete and with a checksum, but ids, times, names and values are of any kind: a broken writer."""
    with between_spans_that_are_read(tmp_path / "run") as recorder:
        for record in records:
            recorder._put(record)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    definitions=st.lists(
        st.tuples(_TEXTS, st.dictionaries(_TEXTS, st.sampled_from(["int", "float", "str", "type"]) | _JSON))
        | _JSON,
        min_size=1,
        max_size=12,
    )
)
def test_definitions_that_say_anything(tmp_path: Path, definitions: list[Any]) -> None:
    with between_spans_that_are_read(tmp_path / "run") as recorder:
        file = recorder._open_file()
        assert file is not None
        for definition in definitions:
            number = file.define(json.dumps(definition))
            assert number is not None
            recorder._put((number, 5, 5, 0, 1, 2, ("text", 1, 0.5), "", ()))


def test_a_part_without_end_is_given_up(tmp_path: Path) -> None:
    """A writer that never ends its records takes no more of the reader's memory than a limit."""
    recorder = RingRecorder(str(tmp_path))
    recorder.open()
    reader = RunReader(str(tmp_path))
    piece = b"[" * ring_format.PART_BYTES
    for count in range(100_000):
        try:
            number, memory, offset = recorder.slots.take()
        except StopIteration:
            read_all(reader)
            assert recorder.make_room()
            continue
        kind = ring_format.KIND_RECORD
        ring_format.SLOT.pack_into(memory, offset, kind, count % 2, 9, 1, 1, count // 2, piece, number)
    read_all(reader)
    recorder.spans(PLAIN)(3, 3, 0, 1, 2, [1])
    assert [record for record in read_all(reader) if isinstance(record, SpanEnd)][-1].span_id == 3
    (ring,) = reader.writers.values()
    assert sum(map(len, ring._decoder._parts.values())) <= 1 << 16
    recorder.close()
    reader.close()


def test_a_record_that_is_longer_than_any_ring_is_dropped_and_counted(tmp_path: Path) -> None:
    recorder = RingRecorder(str(tmp_path))
    recorder.spans(SpanType("huge", {"text": str}))(1, 1, 0, 1, 2, ["x" * (16 << 20)])
    recorder.spans(PLAIN)(2, 2, 0, 1, 2, [1])
    reader = RunReader(str(tmp_path))
    assert [record.span_id for record in read_all(reader) if isinstance(record, SpanEnd)] == [2]
    assert (reader.dropped, reader.damaged) == (1, 0)
    recorder.close()
    reader.close()


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300),
    lambda each: st.lists(each, max_size=300) | st.dictionaries(st.text(), each) | st.tuples(each, each),
)


def decoded(content: bytes, without: Sequence[int] = ()) -> tuple[list[Any], int]:
    """Decode it from as many slots as it takes, ``without`` those of some parts."""
    size = ring_format.PART_BYTES
    parts = [content[at : at + size] for at in range(0, len(content), size)]
    data = bytearray(len(parts) * ring_format.SLOT_BYTES)
    for number, part in enumerate(parts):
        head = ring_format.KIND_RECORD, number, len(parts), len(content), crc32(content), 1
        ring_format.SLOT.pack_into(data, number * ring_format.SLOT_BYTES, *head, part, 1)
    there = [number * ring_format.SLOT_BYTES for number in range(len(parts)) if number not in without]
    return Decoder(lambda: b"", 0).decode(bytes(data), there)


@pytest.mark.parametrize(("missing", "damaged"), [([0], 2), ([1], 1), ([0, 1], 1)])
def test_a_part_that_is_missing_makes_those_after_it_damaged(missing: list[int], damaged: int) -> None:
    record = encode(("process", {"value": "x" * 2 * ring_format.PART_BYTES}))
    assert decoded(record)[1] == 0
    assert decoded(record, missing) == ([], damaged)


def _damaged(value: Any, place: int, byte: int) -> bytes:
    """An encoded value in which one byte is another, now and then."""
    content = bytearray(encode(("process", value)))
    if byte % 4:
        content[place % len(content)] = byte
    return bytes(content)


@settings(deadline=None, max_examples=50, suppress_health_check=list(HealthCheck))
@given(_VALUES)
@example("long" * 10_000)
@example([1] * 60_000)
@example((1 << 4000, -1 << 4000))
def test_whatever_is_encoded_is_decoded(value: Any) -> None:
    """Also what is longer than the pieces that are looked for at once."""
    ((process,), damaged) = decoded(encode(("process", {"value": value})))
    assert not damaged
    assert process.attributes.keys() <= {"value"}


@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=40) | st.builds(_damaged, _VALUES, st.integers(0, 1 << 30), st.integers(0, 255)))
def test_the_compiled_check_of_a_record_agrees_with_pythons(content: bytes) -> None:
    if native.compiled is None:
        pytest.skip(native.why_not)
    assert native.compiled.is_plain(content) is is_plain(content)


HOSTILE = {
    "a set of the tuple that it is in": "a8010000003c010000007200000000",
    "a dictionary whose key is the list that it is in": "db010000007b72000000004e30",
    "code": marshal.dumps(compile("1", "", "eval")).hex(),
    "a tuple of two billion": "28ffffff7f",
    "a text of less than nothing": "75ffffffff",
    "a complex number": marshal.dumps(1j, 2).hex(),
}


@pytest.mark.parametrize("switch", ["on", "off"])
@pytest.mark.parametrize("what", HOSTILE)
def test_no_record_makes_marshal_do_more_than_read_values(what: str, switch: str) -> None:
    """In a process of its own: some of them end it. A run's folder may have come from elsewhere."""
    program = (
        f"from tests.tracing.test_hostile import decoded; print(decoded(bytes.fromhex({HOSTILE[what]!r})))"
    )
    done = python("-c", program, **{native.VARIABLE: switch})
    assert (done.returncode, done.stdout) == (0, "([], 1)\n"), done.stderr
