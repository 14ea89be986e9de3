"""Decodes the slots of a ring file into :mod:`..records`, skipping damaged ones."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.span_readers import make_reader
from sgl_aspects.tracing.record.steps import spans_of
from sgl_aspects.tracing.records import (
    ProcessDescribed,
    Record,
    RequestBegin,
    RequestElsewhere,
    RequestSeen,
    RequestSent,
    SpanBegin,
    SpanEnd,
    SpanType,
)
from sgl_aspects.tracing.schema import REQUEST_ID

# Caps on parts of records whose end has not come: above them, the oldest are given up.
_PENDING_PIECES = 1 << 17
_PENDING_LINKS = 1 << 16
# Groups of requests that steps link to; a scheduler has one at a time, or one for each pipeline stage.
_GROUPS = 256
_STEP = struct.Struct(f"<{layout.STEP_WORDS}Q")
# Limits of OTLP's fields.
_TRACE_IDS, _TIMES = range(1, 1 << 128), range(1 << 63)
_scan = json.JSONDecoder().raw_decode
_KIND_OF = {code: kind for kind, code in layout.CODE_OF.items()}
# Where a record has the latest of its times.
_TIME_OF: dict[Any, int] = {SpanEnd: 5, SpanBegin: 4, RequestBegin: 2, RequestSeen: 2}
# Of a pass: of how many records the latest time is sought.
_LATEST = 64
# Raised for damaged data.
_ERRORS = (ValueError, TypeError, LookupError, struct.error, RecursionError)
_new: Any = tuple.__new__
_WITH_LAYOUT = (layout.KIND_SPAN, layout.KIND_REQUEST, layout.KIND_BEGIN)
#: ``(data, position)`` -> the record in the slot there, None for a part of one, a list for a step.
_Reader = Callable[[bytes, int], "Record | list[SpanEnd] | None"]


class DamagedError(ValueError):
    """Raised for damaged data; caught in the readers."""


class _Layout(NamedTuple):
    type: SpanType
    codes: str
    has_error: bool
    links: int


class _Definitions(dict[int, Any]):
    """The definitions of one kind, by their number: found once, then without a call."""

    def __init__(self, find: Callable[[int, type], Any], kind: type) -> None:
        self._find, self._kind = find, kind

    def __missing__(self, number: int) -> Any:
        found = self[number] = self._find(number, self._kind)
        return found


class Decoder:
    """The definitions of one ring, and incomplete multi-part records.

    ``read_definitions``: returns the definitions' bytes written so far. ``clock_offset``: added to the ring's
    times to get Unix time, in nanoseconds. ``last_ns``: the latest time read.
    """

    def __init__(self, read_definitions: Callable[[], bytes], clock_offset: int) -> None:
        self._read_definitions = read_definitions
        self._clock_offset = clock_offset
        self.last_ns = 0
        self._definitions: list[_Layout | str | list[str] | None] = [None]
        self._strings, self._lists = _Definitions(self._defined, str), _Definitions(self._defined, list)
        # By the first word of a slot.
        self._readers: dict[int, _Reader] = {
            layout.KIND_VOID: _void,
            layout.KIND_SENT: _sent,
            layout.KIND_SEEN: self._packed_seen,
            layout.KIND_STEP: self._step,
            layout.KIND_LINKS: self._span_links,
            layout.KIND_GROUP: self._group,
        }
        self._definitions_end = 0
        self._texts: dict[int, list[bytes]] = {}
        self._pieces = 0
        self._links: dict[int, list[int]] = {}
        self._link_count = 0
        self._groups: dict[int, list[int]] = {}

    def decode(self, data: bytes, positions: Iterable[int]) -> tuple[list[Record], int]:
        """Decode the slots at these positions: the records, and the number of damaged ones."""
        records: list[Any] = []
        damaged, reader_of, links = 0, self._readers.get, self._links
        heads = memoryview(data).cast("Q")[:: layout.STEP_WORDS].tolist()
        if positions != range(0, len(data), layout.SLOT_BYTES):
            heads = [heads[position // layout.SLOT_BYTES] for position in positions]
        for head, position in zip(heads, positions):
            try:
                record: Any = (reader_of(head) or self._reader(head))(data, position)
            except _ERRORS:
                damaged += 1
                continue
            if record.__class__ is list:
                records += record
            elif record is not None:
                records.append(self._with_links(record) if links else record)
        latest = records[-_LATEST:]  # a process writes them in order, its threads nearly so
        times = [each[_TIME_OF[each.__class__]] for each in latest if each.__class__ in _TIME_OF]
        self.last_ns = max([self.last_ns, *times])
        return records, damaged

    def open_step(self, data: bytes, position: int) -> list[SpanEnd]:
        """Decode the spans of a step that is open in the header; none for a free block."""
        if data[position] != layout.KIND_STEP:
            return []
        try:
            return self._step(data, position)
        except _ERRORS as error:
            raise DamagedError(str(error)) from error

    def _reader(self, head: int) -> _Reader:
        """Find the reader of slots with this first word, and keep it if it names a layout."""
        kind, index = head & 0xFF, head >> layout.HEAD_SHIFT
        if kind in (layout.KIND_LONG, layout.KIND_PART):
            return self._text if kind == layout.KIND_LONG else self._part
        if kind not in _WITH_LAYOUT:
            return self._readers[kind]
        found: _Layout = self._defined(index, _Layout)
        reader: _Reader
        if kind == layout.KIND_BEGIN:
            reader = _begin_reader(found.type, self._clock_offset)
        else:
            is_request = kind == layout.KIND_REQUEST
            reader = make_reader(*found, self._strings, self._lists, self._clock_offset, is_request)
        return self._readers.setdefault(kind | index << layout.HEAD_SHIFT, reader)

    def _step(self, data: bytes, position: int) -> list[SpanEnd]:
        words = [*_STEP.unpack_from(data, position)]
        latest = self.last_ns
        for word in range(layout.SCHEDULE_START, layout.PROCESS_END + 1):
            if words[word]:
                words[word] += self._clock_offset
                if words[word] not in _TIMES:
                    raise DamagedError(f"a time of {words[word]}")
                latest = max(latest, words[word])
        self.last_ns = latest
        links = self._groups.get(words[layout.STEP_GROUP], ())
        return spans_of(words, self._defined, links, latest)

    def _packed_seen(self, data: bytes, position: int) -> RequestSeen:
        _, key, time_ns, request_id, _ = layout.SEEN.unpack_from(data, position)
        time_ns += self._clock_offset
        if time_ns >> 63:
            raise DamagedError(f"a time of {time_ns}")
        seen: RequestSeen = _new(RequestSeen, (key, request_id.decode("utf-8", "surrogatepass"), time_ns))
        return seen

    def _span_links(self, data: bytes, position: int) -> None:
        _, span_id, *links, _ = layout.LINKS.unpack_from(data, position)
        self._keep_links(span_id, [link for link in links if link])

    def _group(self, data: bytes, position: int) -> None:
        _, key, *links, _ = layout.LINKS.unpack_from(data, position)
        self._groups.setdefault(key, []).extend(link for link in links if link)
        if len(self._groups) > _GROUPS:
            del self._groups[next(iter(self._groups))]

    def _part(self, data: bytes, position: int) -> None:
        _, index, _, key, piece, _ = layout.TEXT.unpack_from(data, position)
        pieces = self._texts[key] = self._parts_before(key, index)
        pieces.append(piece)
        self._pieces += len(pieces)
        while self._pieces > _PENDING_PIECES:
            self._pieces -= len(self._texts.pop(next(iter(self._texts))))

    def _parts_before(self, key: int, count: int) -> list[bytes]:
        pieces = self._texts.pop(key, [])
        self._pieces -= len(pieces)
        if len(pieces) != count:
            raise DamagedError("a part of a record is missing")
        return pieces

    def _text(self, data: bytes, position: int) -> Record:
        _, index, size, key, piece, _ = layout.TEXT.unpack_from(data, position)
        if index:
            piece = b"".join([*self._parts_before(key, index), piece])
        if not 0 <= len(piece) - size < layout.TEXT_BYTES:
            raise DamagedError("a record of the wrong length")
        (name, *fields), _ = _scan(piece[:size].decode())
        make, kinds = _TEXT_RECORDS[name]
        if len(fields) != len(kinds) or not all(map(isinstance, fields, kinds)):
            raise DamagedError("a record with fields of the wrong type")
        return make(self, *fields)

    def _span_from_text(self, name: str, names: int | list[Any], *fields: Any) -> SpanEnd:
        span_id, root_id, parent_id, start_ns, end_ns, values, error, links = fields
        _check(span_id | root_id | parent_id, start_ns | end_ns)
        for link in links:
            _check(link)
        type = _type_from_text(name, *self._names(names))
        values, error = _encodable_values(values), _encodable_text(error)
        return SpanEnd(type, span_id, root_id, parent_id, start_ns, end_ns, values, error, links)

    def _request(self, name: str, names: int | list[Any], *fields: Any) -> RequestBegin:
        span_id, high, low, parent_id, start_ns, (flags, name, *values), state, _ = fields
        trace_id = high << 64 | low
        _check(span_id | parent_id, start_ns, trace_id)
        known = zip([*self._names(names)][2:], values)
        found = {key: value for key, value in known if value is not None}
        request_id = str(found.pop("") if "" in found else found[REQUEST_ID])
        attributes = dict(zip(found, _encodable_values([*found.values()])))
        sampled, remote = flags & 1 != 0, flags & 2 != 0
        return RequestBegin(
            *(span_id, request_id, start_ns, trace_id, parent_id, sampled, state, remote),
            *(_encodable_text(str(name)), attributes),
        )

    def _seen(self, key: int, request_id: str, time_ns: int) -> RequestSeen:
        _check(key, time_ns)
        return RequestSeen(key, request_id, time_ns)

    def _elsewhere(self, key: int, trace_id: int, span_id: int, sampled: bool) -> RequestElsewhere:
        _check(key | span_id, 0, trace_id)
        return RequestElsewhere(key, trace_id, span_id, sampled)

    def _description(self, attributes: dict[str, Any]) -> ProcessDescribed:
        found = {_encodable_text(key): encodable(value) for key, value in attributes.items()}
        return ProcessDescribed({key: value for key, value in found.items() if value is not None})

    def _names(self, names: int | list[Any]) -> Iterable[str]:
        """Attribute names: in the text, or by their number."""
        if isinstance(names, int):
            found: _Layout = self._defined(names, _Layout)
            return found.type.attributes
        return [_encodable_text(str(name)) for name in names]

    def _keep_links(self, span_id: int, links: list[int]) -> None:
        self._links.setdefault(span_id, []).extend(links)
        self._link_count += len(links)
        while self._link_count > _PENDING_LINKS:
            self._take_links(next(iter(self._links)))

    def _with_links(self, record: Any) -> Any:
        if record.__class__ is not SpanEnd:
            return record
        return record._replace(links=[*self._take_links(record.span_id), *record.links])

    def _take_links(self, span_id: int) -> list[int]:
        links = self._links.pop(span_id, [])
        self._link_count -= len(links)
        return links

    def _defined(self, index: int, kind: type = str) -> Any:
        """Return the definition with this number: a text, a list of texts, or a layout."""
        if index >= len(self._definitions):
            self._read_more()
        found = self._definitions[index]
        if found.__class__ is not kind:
            raise DamagedError(f"definition {index} is not a {kind.__name__}")
        return found

    def _read_more(self) -> None:
        data = self._read_definitions()
        while self._definitions_end + 4 <= len(data):
            start = self._definitions_end + 4
            size = int.from_bytes(data[start - 4 : start], "little")
            if start + size > len(data):
                break
            self._definitions_end = start + size
            self._definitions.append(_parse_definition(data[start : start + size]))


def _parse_definition(data: bytes) -> _Layout | str | list[str] | None:
    """Decode a definition; None for a damaged one, since those after it keep their numbers."""
    try:
        text = data[1:].decode()
        if data[:1] == b"T":
            return text
        if data[:1] == b"J":
            return [_encodable_text(str(each)) for each in json.loads(text)]
        name, names, codes, has_error, links = json.loads(text)
        if (
            data[:1] != b"L"
            or not isinstance(has_error, bool)
            or not 0 <= links <= layout.SPAN_WORDS - layout.span_words(codes) - has_error
        ):
            return None
        kinds = [_KIND_OF[code] for code in codes] or [object] * len(names)
        return _Layout(_type_of(name, dict(zip(names, kinds))), str(codes), has_error, links)
    except _ERRORS:
        return None


def _begin_reader(type: SpanType, clock_offset: int) -> _Reader:
    def read(data: bytes, position: int) -> SpanBegin:
        _, span_id, root_id, parent_id, start, _ = layout.BEGIN.unpack_from(data, position)
        start += clock_offset
        if start >> 63:
            raise DamagedError(f"a time of {start}")
        begin: SpanBegin = _new(SpanBegin, (type, span_id, root_id, parent_id, start))
        return begin

    return read


def _void(data: bytes, position: int) -> None:
    """A slot without a record."""


def _sent(data: bytes, position: int) -> RequestSent:
    sent: RequestSent = _new(RequestSent, (layout.BEGIN.unpack_from(data, position)[1],))
    return sent


def _type_of(name: Any, attributes: dict[Any, type]) -> SpanType:
    return SpanType(
        _encodable_text(str(name)), {_encodable_text(str(key)): kind for key, kind in attributes.items()}
    )


@functools.lru_cache(maxsize=1024)
def _type_from_text(name: str, *names: Any) -> SpanType:
    return _type_of(name, dict.fromkeys(names, object))


def _check(ids: int, times: int = 0, trace_id: int = 1) -> None:
    """Raise ``DamagedError`` for a decoded number, or several or'ed, that is too large or negative."""
    if ids >> 64 or times >> 63 or trace_id not in _TRACE_IDS:
        raise DamagedError(f"ids, times or a trace id out of range: {ids, times, trace_id}")


def _encodable_text(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _encodable_values(values: Sequence[Any]) -> list[Any]:
    # Most are valid: checking is faster than calling.
    return [
        value
        if value.__class__ is float or (value.__class__ is str and value.isascii())
        else encodable(value)
        for value in values
    ]


def encodable(value: Any) -> Any:
    """Return valid UTF-8, numbers that fit 64 bits, lists of these: one bad value would cost its whole batch.

    Values packed in a slot always are; values from JSON may be anything.
    """
    if value is None:
        return None
    kind = type(value)
    if kind is str:
        return value if value.isascii() else _encodable_text(value)
    if kind is float or kind is bool or (kind is int and -(1 << 63) <= value < 1 << 63):
        return value
    if kind is list:
        return [encodable(item if not isinstance(item, list) else str(item)) for item in value]
    return _encodable_text(str(value))


_TEXT_RECORDS: dict[str, tuple[Callable[..., Record], tuple[type | tuple[type, ...], ...]]] = {
    "R": (Decoder._request, (str, (int, list), int, int, int, int, int, list, str, list)),
    "P": (Decoder._description, (dict,)),
    "E": (Decoder._elsewhere, (int, int, int, bool)),
    "A": (Decoder._seen, (int, str, int)),
    "S": (Decoder._span_from_text, (str, (int, list), int, int, int, int, int, list, str, list)),
}
