"""The fast path of the flight recorder: a writer function generated for each type of span.

It looks texts up and packs all values in one expression. A loop over the attributes would double the cost.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from sgl_aspects.generated import execute
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.recorder import SpanWriter
from sgl_aspects.tracing.records import AttributeValue, SpanType

#: :func:`shape` of a span -> the function that packs such a span, and the first word of its slot.
Layouts = dict[int, tuple[Callable[..., None], int]]
_class = type
_MOST_CHOICES = 16
_OTHERS: dict[type, type] = {_class(None): int}  # None is encodable as any type
_WITHOUT_CODE = bytes
#: Raised by ``pack_into`` for a value of the wrong type, or one that needs more than 64 bits.
MISFITS = (struct.error, TypeError, ValueError, OverflowError)


class NoRoomError(Exception):
    """Raised for ids that do not fit a slot."""


_SOURCE = """
def make(slots, texts, layouts, learn, write_as_text):
    def write(span_id, root_id, parent_id, start_ns, end_ns, values=(), error="", links=()):
        try:
            {take_apart}
            if error or links:
                pack_into, head = layouts[len(links) << 1 | (error != "")]  # see shape()
                more = [texts[error], *links] if error else links
            else:
                pack_into, head = layouts[0]
                more = None
            number, memory, offset = slots.take()
        except StopIteration:
            if slots.make_room():
                learn(span_id, root_id, parent_id, start_ns, end_ns, values, error, links)
            return
        except NoRoomError:
            write_as_text(span_id, root_id, parent_id, start_ns, end_ns, values, error, links)
            return
        except (LookupError, TypeError, ValueError):
            learn(span_id, root_id, parent_id, start_ns, end_ns, values, error, links)
            return
        try:
            if more is None:
                pack_into(
                    memory, offset, head, span_id, root_id, parent_id, start_ns, end_ns, {words}{ids}number
                )
            else:
                pack_into(
                    memory, offset, head, span_id, root_id, parent_id, start_ns, end_ns,
                    {words}*more, {ids}number
                )
        except MISFITS:
            slots.void(number, memory, offset)
            write_as_text(span_id, root_id, parent_id, start_ns, end_ns, values, error, links)

    return write
"""


# Lookups of texts and lists; ids, 0 for one that is none.
_LOOKUPS = {"t": "{0} = texts[{0}]", "l": "{0} = texts[None if {0} is None else ({0}.__class__, *{0})]"}
_IDS = {
    "s": "'' if {0} is None else {0} or 0",
    "o": "'' if {0} is None else {0}[0] or 0 if {0}.__class__ is list and len({0}) == 1 else 0",
}


def shape(links: int, has_error: bool) -> int:
    """Return one number for both: a dictionary finds it faster than a pair. 0: neither, the common case."""
    return links << 1 | has_error


def codes_of(type: SpanType) -> str | None:
    """Return one code per attribute (:data:`.format.CODES`); None if spans of it do not fit a slot."""
    found = [layout.CODE_OF.get(each) for each in type.attributes.values()]
    if None in found:
        return None
    codes = "".join(map(str, found))
    return codes if layout.span_words(codes) <= layout.SPAN_WORDS else None


def join_ids(ids: tuple[Any, ...], room: int) -> bytes:
    """Return the bytes of a slot's ids; ``NoRoomError`` unless they are texts that fit ``room``."""
    try:
        joined = "\0".join(ids).encode()
    except (TypeError, ValueError):
        raise NoRoomError from None
    if len(joined) > room or joined.count(0) >= len(ids):
        raise NoRoomError
    return joined


def writer_by_values(type: SpanType, make: Callable[[SpanType], SpanWriter]) -> SpanWriter:
    """The writer of spans with attributes of any type (``object``): one writer per combination of types.

    ``make`` returns the writer for a combination; beyond the first few, the writer without codes is used,
    which takes everything as text.
    """
    writers: dict[tuple[Any, ...], SpanWriter] = {}

    def write_by_values(
        span_id: int,
        root_id: int,
        parent_id: int,
        start_ns: int,
        end_ns: int,
        values: Sequence[AttributeValue] = (),
        error: str = "",
        links: Sequence[int] = (),
    ) -> None:
        classes = (*map(_class, values),)
        if classes not in writers:
            if len(writers) >= _MOST_CHOICES:
                classes = ()
            kinds = [kind if kind in layout.CODE_OF else _OTHERS.get(kind, _WITHOUT_CODE) for kind in classes]
            kinds += [_WITHOUT_CODE] * (len(type.attributes) - len(kinds))
            if classes not in writers:
                writers[classes] = make(SpanType(type.name, dict(zip(type.attributes, kinds))))
        write = writers[classes]
        write(span_id, root_id, parent_id, start_ns, end_ns, values, error, links)

    return write_by_values


def make_writer(
    codes: str,
    slots: Any,
    texts: dict[str | None, int],
    layouts: Layouts,
    learn: Callable[..., None],
    write_as_text: Callable[..., None],
) -> SpanWriter:
    """The writer of spans with attributes of these codes.

    ``slots``: a :class:`~sgl_aspects.tracing.record.slots.Slots`. ``learn`` is called with the arguments of a
    span if ``layouts`` or ``texts`` lack what it needs, or the number of values is wrong: it defines them and
    calls the writer, or gives up. ``write_as_text`` gets what does not fit a slot.
    """
    names = [f"value_{number}" for number in range(len(codes))]
    lines = [f"{', '.join(names)}, = values" if names else ""]
    lines += [_LOOKUPS[code].format(name) for name, code in zip(names, codes) if code in _LOOKUPS]
    words = [
        name if code in _LOOKUPS else f"NONE if {name} is None else {name}"
        for name, code in zip(names, codes)
        if code not in _IDS
    ]
    ids = [_IDS[code].format(name) for name, code in zip(names, codes) if code in _IDS]
    if ids:
        lines.append(f"ids = join_ids(({', '.join(ids)},), {layout.ids_bytes(codes) - 1})")
    source = _SOURCE.format(
        take_apart=("\n" + " " * 12).join(filter(None, lines)),
        words="".join(f"{word}, " for word in words),
        ids="ids, " if ids else "",
    )
    known: dict[str, Any] = {
        "MISFITS": MISFITS,
        "NONE": layout.NONE,
        "NoRoomError": NoRoomError,
        "join_ids": join_ids,
    }
    execute(source, f"span writer {codes}", known)
    writer: SpanWriter = known.pop("make")(slots, texts, layouts, learn, write_as_text)
    return writer
