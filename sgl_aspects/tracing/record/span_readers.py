"""Readers of records with attributes: a function generated for each layout, like the writers
(:mod:`.span_writers`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sgl_aspects.generated import execute
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.records import RequestBegin, SpanEnd, SpanType
from sgl_aspects.tracing.schema import REQUEST_ID

#: ``(data, position)`` -> the span or the request in the slot there. Raises ``ValueError`` for a time beyond
#: OTLP's range or a trace id of 0, and what reading a definition raises.
SlotReader: TypeAlias = "Callable[[bytes, int], SpanEnd | RequestBegin]"

_SOURCE = """
def make(type, texts, lists, clock_offset):
    def read(data, position):
        _, span_id, root_id, parent_id, start_ns, end_ns, {words}_ = unpack_from(data, position)
        start_ns += clock_offset
        end_ns += clock_offset
        if (start_ns | end_ns) >> 63:
            raise ValueError(f"a time among {{start_ns, end_ns}}")
        {ids}
        # The same as SpanEnd(…), in a third of the time.
        return new(SpanEnd, (
            type, span_id, root_id, parent_id, start_ns, end_ns, [{values}], {error}, [{links}]
        ))
    return read
"""
# What is a span's start is here the parent's id.
_REQUEST_SOURCE = """
def make(type, texts, lists, clock_offset):
    def read(data, position):
        _, span_id, high, low, parent_id, start_ns, {words}_ = unpack_from(data, position)
        start_ns += clock_offset
        if start_ns >> 63 or not high | low:
            raise ValueError(f"a time or a trace id of {{start_ns, high, low}}")
        {ids}
        attributes = {{{items}}}
        return new(RequestBegin, (
            span_id, {request_id}, start_ns, high << 64 | low, parent_id, value_0 & 1 != 0,
            {error}, value_0 & 2 != 0, texts[value_1], attributes
        ))
    return read
"""
# How to decode a value, by its code. The number for none is as exact as a float.
_VALUES = {
    "i": "None if {0} == NONE else {0}",
    "f": "None if {0} == NONE else {0}",
    "b": "None if {0} == NONE else {0} != 0",
    "t": "texts[{0}] if {0} else None",
    "l": "lists[{0}] if {0} else None",
    "s": "{0} or None",
    "o": "[{0}] if {0} else None",
}


def make_reader(
    type: SpanType,
    codes: str,
    has_error: bool,
    links: int,
    texts: Mapping[int, str],
    lists: Mapping[int, list[str]],
    clock_offset: int,
    is_request: bool,
) -> SlotReader:
    """The reader of spans of ``type`` with values of these codes and ``links`` links.

    ``texts``, ``lists``: the ring's definitions, by their number. ``clock_offset``: added to
    the ring's times to get Unix time, in nanoseconds. ``is_request``: of requests that began instead.
    """
    names = (*type.attributes,) if is_request else ()
    reader: SlotReader = _maker(codes, has_error, links, names)(type, texts, lists, clock_offset)
    return reader


@functools.lru_cache(maxsize=1024)
def _maker(codes: str, has_error: bool, links: int, keys: tuple[str, ...]) -> Callable[..., SlotReader]:
    names = [f"value_{number}" for number in range(len(codes))]
    link_names = [f"link_{number}" for number in range(links)]
    id_names = [name for name, code in zip(names, codes) if not layout.CODES[code]]
    words = [name for name, code in zip(names, codes) if layout.CODES[code]]
    words += [*["error"] * has_error, *link_names, *["ids"] * bool(id_names)]
    values = [_VALUES[code].format(name) for name, code in zip(names, codes)]
    parts = {
        "words": "".join(f"{name}, " for name in words),
        "ids": f'{", ".join(id_names)}, = ids.decode().split("\\0")' if id_names else "",
        "error": "texts[error]" if has_error else "''",
    }
    if keys:
        by_key = dict(zip(keys[2:], values[2:]))
        items = ", ".join(f"{key!r}: {value}" for key, value in by_key.items() if key)
        request_id = names[keys.index("" if "" in by_key else REQUEST_ID)]
        source = _REQUEST_SOURCE.format(items=items, request_id=request_id, **parts)
    else:
        source = _SOURCE.format(values=", ".join(values), links=", ".join(link_names), **parts)
    known: dict[str, Any] = {
        "NONE": layout.NONE,
        "RequestBegin": RequestBegin,
        "SpanEnd": SpanEnd,
        "new": tuple.__new__,
        "unpack_from": layout.span_struct(codes, has_error, links).unpack_from,
    }
    maker: Callable[..., SlotReader] = execute(source, f"span reader {codes}", known).pop("make")
    return maker
