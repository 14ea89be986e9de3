"""Reading spans back: a function made for each layout, as there is one for writing (:mod:`.span_writers`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from sgl_aspects.generated import execute
from sgl_aspects.tracing.ring import format as layout

#: ``(data, position, text_of)`` -> the fields of a :class:`~sgl_aspects.tracing.records.SpanEnd` after its
#: type, times as in the ring. ``text_of``: gives the text that is defined under a number.
SpanReader: TypeAlias = "Callable[[bytes, int, Callable[[int], str]], tuple[Any, ...]]"

_SOURCE = """
def read(data, position, text_of):
    _, span_id, root_id, parent_id, start_ns, end_ns, {words}_ = unpack_from(data, position)
    return span_id, root_id, parent_id, start_ns, end_ns, [{values}], {error}, [{links}]
"""
# What a word says, by the code of its value. The number for none is as exact as a float.
_VALUES = {
    "i": "None if {0} == NONE else {0}",
    "f": "None if {0} == NONE else {0}",
    "b": "None if {0} == NONE else {0} != 0",
    "t": "text_of({0}) if {0} else None",
}


@functools.lru_cache(maxsize=1024)
def make_reader(codes: str, has_error: bool, links: int) -> SpanReader:
    """The reader of spans with values of these codes and ``links`` links."""
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
        "unpack_from": layout.span_struct(codes, has_error, links).unpack_from,
    }
    reader: SpanReader = execute(source, f"span reader {codes}", known)["read"]
    return reader
