"""Readers of spans: a function generated for each layout, like the writers (:mod:`.span_writers`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from sgl_aspects.generated import execute
from sgl_aspects.tracing.records import SpanEnd, SpanType
from sgl_aspects.tracing.ring import format as layout

#: ``(data, position)`` -> the span in the slot there. Raises ``ValueError`` for a time beyond OTLP's range,
#: and what ``text_of`` raises.
SpanReader: TypeAlias = "Callable[[bytes, int], SpanEnd]"

_SOURCE = """
def make(type, text_of, clock_offset):
    def read(data, position):
        _, span_id, root_id, parent_id, start_ns, end_ns, {words}_ = unpack_from(data, position)
        start_ns += clock_offset
        end_ns += clock_offset
        if (start_ns | end_ns) >> 63:
            raise ValueError(f"a time among {{start_ns, end_ns}}")
        # The same as SpanEnd(…), in a third of the time.
        return new(SpanEnd, (
            type, span_id, root_id, parent_id, start_ns, end_ns, [{values}], {error}, [{links}]
        ))
    return read
"""
# How to decode a word, by the code of its value. The number for none is as exact as a float.
_VALUES = {
    "i": "None if {0} == NONE else {0}",
    "f": "None if {0} == NONE else {0}",
    "b": "None if {0} == NONE else {0} != 0",
    "t": "text_of({0}) if {0} else None",
}


def make_reader(
    type: SpanType,
    codes: str,
    has_error: bool,
    links: int,
    text_of: Callable[[int], str],
    clock_offset: int,
) -> SpanReader:
    """The reader of spans of ``type`` with values of these codes and ``links`` links.

    ``text_of``: returns the text with a number. ``clock_offset``: added to the ring's times to get Unix time,
    in nanoseconds.
    """
    reader: SpanReader = _maker(codes, has_error, links)(type, text_of, clock_offset)
    return reader


@functools.lru_cache(maxsize=1024)
def _maker(codes: str, has_error: bool, links: int) -> Callable[..., SpanReader]:
    names = [f"value_{number}" for number in range(len(codes))]
    link_names = [f"link_{number}" for number in range(links)]
    source = _SOURCE.format(
        words="".join(f"{name}, " for name in [*names, *["error"] * has_error, *link_names]),
        values=", ".join(_VALUES[code].format(name) for name, code in zip(names, codes)),
        error="text_of(error)" if has_error else "''",
        links=", ".join(link_names),
    )
    known: dict[str, Any] = {
        "NONE": layout.NONE,
        "SpanEnd": SpanEnd,
        "new": tuple.__new__,
        "unpack_from": layout.span_struct(codes, has_error, links).unpack_from,
    }
    maker: Callable[..., SpanReader] = execute(source, f"span reader {codes}", known).pop("make")
    return maker
