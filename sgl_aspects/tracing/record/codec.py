"""Records as bytes and back: :mod:`marshal` of plain values with a checksum, in as many slots as it takes.

Only a step has a form of its own (:mod:`.steps`). Nothing that is read is trusted: damage is skipped.
"""

from __future__ import annotations

import json
import marshal
import numbers
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from zlib import crc32

from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.record.steps import spans_of
from sgl_aspects.tracing.records import (
    Latest,
    ProcessDescribed,
    Record,
    RequestBegin,
    RequestElsewhere,
    RequestSeen,
    RequestSent,
    SpanBegin,
    SpanEnd,
    SpanType,
    encodable,
)

#: The values that need no conversion.
PLAIN = frozenset((int, float, str, bool, type(None)))
#: The first field of a record; a span's is the number of its type, and those of others are in ``NAMES``.
BEGIN, GROUP = "begin", "group"
_MARSHAL_VERSION = 2  # without references, which take longer; the same in every version of Python
_NONE = type(None)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in (int, float, bool, str, list, object)}
# Caps on parts of records whose end has not come, and on groups of requests that steps link to: a scheduler
# has one at a time, or one for each pipeline stage. Above them, the oldest are given up.
_PENDING_PARTS = 1 << 16
_GROUPS = 256
# Cap on kept combinations of a type of spans and the classes of its values, and of attributes' names.
_TYPES = 1024
_LONGEST_TEXT = 200
_STEP = struct.Struct(f"<{layout.STEP_WORDS}Q")
# Raised for damaged data.
_ERRORS = (
    *(ValueError, TypeError, LookupError, AttributeError, EOFError, MemoryError, RecursionError),
    struct.error,
)


# The kinds of values that encode writes: bytes of one of a fixed size, and those that begin with a count.
_FIXED_SIZES = {**dict.fromkeys(b"NTF0{", 1), ord("i"): 5, ord("g"): 9}
_COUNTED, _IN_BYTES = frozenset(b"ul(["), frozenset(b"ul")
_new: Any = tuple.__new__
_head_at = layout.SLOT_HEAD.unpack_from


class DamagedError(ValueError):
    """Raised for damaged data; caught in the readers."""


def encode(record: tuple[Any, ...]) -> bytes:
    """Encode a tuple of plain values, or lists and dictionaries of these."""
    return marshal.dumps(record, _MARSHAL_VERSION)


def plain(value: Any) -> Any:
    """Return the value in a form that :func:`encode` takes; as a text where it has no other."""
    if value.__class__ in PLAIN:
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(plain, value)]
    if isinstance(value, str):
        return str.__str__(value)  # of an enumeration the value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else str(value)


def definition(what: SpanType | ProcessDescribed | str) -> str:
    """Encode a type of spans, the process's description, or a text, for a ring's definitions."""
    if isinstance(what, str):
        return json.dumps(what[:_LONGEST_TEXT])
    if isinstance(what, ProcessDescribed):
        return json.dumps(plain(what.attributes))
    known = ((name, kind if kind in _KINDS.values() else object) for name, kind in what.attributes.items())
    return json.dumps([what.name, {name: kind.__name__ for name, kind in known}])


class Decoder:
    """The definitions of one ring, and its incomplete records.

    ``read_definitions``: returns the definitions' bytes written so far. ``clock_offset``: added to the ring's
    times to get Unix time, in nanoseconds. ``last_ns``: the latest time read.
    """

    def __init__(self, read_definitions: Callable[[], bytes], clock_offset: int) -> None:
        self._read_definitions = read_definitions
        self._clock_offset = clock_offset
        self.last_ns = 0
        self._definitions: list[SpanType | ProcessDescribed | str | None] = [None]
        self._definitions_end = 0
        # By the definition and the classes of the values; and names of attributes, by their numbers.
        self._types: Latest[tuple[Any, ...], SpanType] = Latest(_TYPES)
        self._names: Latest[tuple[Any, ...], list[str]] = Latest(_TYPES)
        self._parts: dict[int, list[bytes]] = {}
        self._part_count = 0
        self._groups: Latest[int, tuple[int, ...]] = Latest(_GROUPS)

    def decode(self, data: bytes, positions: Iterable[int]) -> tuple[list[Record], int]:
        """Decode the slots at these positions: the records, and the number of damaged ones."""
        records: list[Record] = []
        damaged = 0
        span, head_bytes = self._span, layout.SLOT_HEAD.size
        for position in positions:
            try:
                kind, part, parts, size, checksum, first = _head_at(data, position)
                if kind == layout.KIND_STEP:
                    records += self._step(data, position)
                    continue
                if kind != layout.KIND_RECORD or part >= parts:
                    raise DamagedError(f"a record of kind {kind}, part {part} of {parts}")
                start = position + head_bytes
                if parts == 1 and size <= layout.PART_BYTES:
                    content = data[start : start + size]
                else:
                    whole = self._joined(first, part, parts, data[start : start + layout.PART_BYTES])
                    if whole is None:
                        continue
                    content = whole[:size]
                if crc32(content) != checksum:
                    raise DamagedError("a record with another checksum")
                if not _is_safe(content):
                    raise DamagedError("a record of other things than plain values")
                record = marshal.loads(content)
                name = record[0]
                if name.__class__ is int:
                    records.append(span(*record))
                elif name == BEGIN:
                    records.append(self._begin(*record[1:]))
                elif name == GROUP:
                    self._group(*record[1:])
                else:
                    records.append(self._event(_EVENTS[name], *record[1:]))
            except _ERRORS:
                damaged += 1
        return records, damaged

    def open_step(self, data: bytes, position: int) -> list[SpanEnd]:
        """Decode the spans of a step that is open in the header; none for a free block."""
        if data[position] != layout.KIND_STEP:
            return []
        try:
            return self._step(data, position)
        except _ERRORS as error:
            raise DamagedError(str(error)) from error

    def _step(self, data: bytes, position: int) -> list[SpanEnd]:
        words = [*_STEP.unpack_from(data, position)]
        for word in layout.STEP_TIMES:
            if words[word]:
                words[word] = self._time(words[word])
        links = self._groups.get(words[layout.STEP_GROUP], ())
        return spans_of(words, self._text, links, self.last_ns)

    def _joined(self, first: int, part: int, parts: int, content: bytes) -> bytes | None:
        """Keep a part of a record; return the whole with the last one. ``first``: the number of its first."""
        found = self._parts.pop(first, [])
        self._part_count -= len(found)
        if len(found) != part:
            raise DamagedError("a part of a record is missing")
        found.append(content)
        if len(found) == parts:
            return b"".join(found)
        self._parts[first] = found
        self._part_count += len(found)
        while self._part_count > _PENDING_PARTS:
            self._part_count -= len(self._parts.pop(next(iter(self._parts))))
        return None

    def _span(
        self,
        number: int,
        span_id: int,
        root_id: int,
        parent_id: int,
        start: int,
        end: int,
        values: Any,
        error: str,
        links: Any,
    ) -> SpanEnd:
        # Inlined: most of what is read are spans.
        start += self._clock_offset
        end += self._clock_offset
        if (span_id | root_id | parent_id) >> 64 or (start | end) >> 63 or error.__class__ is not str:
            raise DamagedError(f"a span of {span_id, root_id, parent_id, start, end, error}")
        if end > self.last_ns:
            self.last_ns = end
        if links:
            _check(*links)
        key = number, *map(type, values)
        kind = self._types.get(key) or self._type_of(key)
        error = error and encodable(error)
        fields = kind, span_id, root_id, parent_id, start, end, values, error, [*links] if links else ()
        # The same as SpanEnd(…), in a third of the time.
        span: SpanEnd = _new(SpanEnd, fields)
        return span

    def _begin(self, type: int, span_id: int, root_id: int, parent_id: int, start: int) -> SpanBegin:
        if (span_id | root_id | parent_id) >> 64:
            raise DamagedError(f"the begin of {span_id, root_id, parent_id}")
        return SpanBegin(self._type(type), span_id, root_id, parent_id, self._time(start))

    def _event(self, kind: Any, *fields: Any) -> Record:
        if len(fields) != len(kind._fields):
            raise DamagedError(f"a {kind.__name__} of {len(fields)} fields")
        event: Record = _new(kind, map(self._field, kind._fields, fields))
        return event

    def _field(self, name: str, value: Any) -> Any:
        """Read a field of a rarer record, as its name says: most are ids."""
        kind = value.__class__
        if kind is not _CLASSES.get(name, int):
            raise DamagedError(f"{name} {value!r}")
        if kind is int:
            if name in _TIMES:
                return self._time(value)
            if value >> (128 if name == "trace_id" else 64) or (not value and name == "trace_id"):
                raise DamagedError(f"{name} {value}")
            return value
        if name == "name":
            return encodable(value)
        return self._named(value) if kind is dict else value

    def _named(self, attributes: dict[Any, Any]) -> dict[str, Any]:
        """Return attributes whose keys are the numbers of their names, or names that had no room."""
        keys = (*attributes,)
        names = self._names.get(keys)
        if names is None:
            names = [self._text(key) if key.__class__ is int else encodable(str(key)) for key in keys]
            self._names[keys] = names
        return dict(zip(names, attributes.values()))

    def _group(self, key: int, links: tuple[int, ...]) -> None:
        _check(key, *links)
        self._groups[key] = links

    def _time(self, time: int) -> int:
        """Return a ring's time as Unix time."""
        time += self._clock_offset
        if time >> 63:
            raise DamagedError(f"a time of {time}")
        if time > self.last_ns:
            self.last_ns = time
        return time

    def _type_of(self, key: tuple[Any, ...]) -> SpanType:
        """Return the type for values of these classes: an attribute's type is that of its value."""
        number, *kinds = key
        type = self._type(number)
        named = zip(type.attributes.items(), kinds)
        others = {name: kind for (name, known), kind in named if kind not in (known, _NONE)}
        if others:
            type = SpanType(type.name, {**type.attributes, **others})
        self._types[key] = type
        return type

    def _type(self, number: int) -> SpanType:
        found = self._defined(number)
        if found.__class__ is not SpanType:
            raise DamagedError(f"definition {number} is not a type of spans")
        return found

    def _text(self, number: int) -> str:
        found = self._defined(number)
        if found.__class__ is not str:
            raise DamagedError(f"definition {number} is not a text")
        return found

    def _defined(self, number: int) -> Any:
        if number >= len(self._definitions):
            self._definitions += self._new_definitions()
        return self._definitions[number]

    def descriptions(self) -> list[ProcessDescribed]:
        """Return what the process has said of itself: the records of it may be overwritten."""
        self._definitions += self._new_definitions()
        return [each for each in self._definitions if isinstance(each, ProcessDescribed)]

    def _new_definitions(self) -> Iterator[SpanType | ProcessDescribed | str | None]:
        data = self._read_definitions()
        while self._definitions_end + 4 <= len(data):
            start = self._definitions_end + 4
            size = int.from_bytes(data[start - 4 : start], "little")
            if start + size > len(data):
                break
            self._definitions_end = start + size
            yield _parse_definition(data[start : start + size])


def is_plain(content: bytes) -> bool:
    """Return whether there is nothing but what :func:`encode` writes: marshal would also read references, on
    which it crashes, and code.
    """
    position, end = 0, len(content)
    while position < end:
        kind = content[position]
        if kind in _FIXED_SIZES:
            position += _FIXED_SIZES[kind]
            continue
        count = int.from_bytes(content[position + 1 : position + 5], "little", signed=True)
        if kind == ord("l"):  # digits of 15 bits, and the number's sign
            count = 2 * abs(count)
        position += 5
        if kind not in _COUNTED or not 0 <= count <= end - position:  # an item takes a byte at least
            return False
        if kind in _IN_BYTES:
            position += count
    return position == end


_is_safe: Callable[[bytes], bool] = getattr(native.compiled, "is_plain", is_plain)


def _parse_definition(data: bytes) -> SpanType | ProcessDescribed | str | None:
    """Decode a definition; None for a damaged one, since those after it keep their numbers."""
    try:
        found = json.loads(data)
        if isinstance(found, str):
            return str(encodable(found))
        if isinstance(found, dict):
            return ProcessDescribed({encodable(key): encodable(value) for key, value in found.items()})
        name, attributes = found
        return SpanType(
            encodable(str(name)), {encodable(key): _KINDS[kind] for key, kind in attributes.items()}
        )
    except _ERRORS:
        return None


def _check(*ids: int) -> None:
    """Raise ``DamagedError`` for a number that is too large or negative, ``TypeError`` for no number."""
    for each in ids:
        if each >> 64:
            raise DamagedError(f"an id of {each}")


#: The names of records but spans in a ring.
NAMES: dict[type, str] = {
    RequestBegin: "request",
    RequestSent: "sent",
    RequestSeen: "seen",
    RequestElsewhere: "elsewhere",
    ProcessDescribed: "process",
}
_EVENTS = {name: kind for kind, name in NAMES.items()}
#: The classes of their fields that are not numbers, and the numbers that are times.
_CLASSES = {
    **dict.fromkeys(("request_id", "trace_state", "name"), str),
    **dict.fromkeys(("sampled", "remote"), bool),
    "attributes": dict,
}
_TIMES = ("start_ns", "time_ns")
