"""The flight recorder: one memory-mapped ring of fixed-size records for each traced process.

A span is one ``pack_into`` of numbers: no thread, no lock, no encoding, no system call. It is there for the
collector even if the process is killed the next moment. docs/recorder.md describes the file.

What makes it safe without a lock: two things are one step each under the interpreter's lock, taking the next
number from a range iterator and packing a slot. The slot's last field, its mark, is written last: a slot
whose mark is not its number was not finished. A slot is used again only after the collector has moved on; a
writer that is a whole ring ahead drops the newest and counts.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sgl_aspects.tracing import ring_format as layout
from sgl_aspects.tracing.context import TraceContext, make_current, trace_id_of_root
from sgl_aspects.tracing.control import Control, run_control
from sgl_aspects.tracing.recorder import id_source
from sgl_aspects.tracing.records import AttributeValue, SpanType
from sgl_aspects.tracing.ring_file import RingFile

# Values that JSON has no word for (a tensor's number given as a seed, say) are written as text.
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
_class = type
_FIRST = layout.SLOTS_OFFSET
_CODE_OF: dict[Any, str] = {int: "i", float: "f", bool: "b", str: "t", type(None): "n"}
_pack_begin = layout.BEGIN.pack_into
# A text is defined when it is met for the second time: ids that come once do not fill the definitions.
_TEXTS_MET = 4096
_LONGEST_TEXT = 200

_Pack = Callable[..., None]
_NOTHING_LEFT: Callable[[], int] = iter(()).__next__


class RingRecorder:
    """The recorder of this process: a :class:`~sgl_aspects.tracing.recorder.Recorder` over a ring.

    The file is made by ``open()`` or with the first record. A run folder that is gone means that the run
    has ended: recording then stops for good. ``level`` and ``sample`` are what the control block asks for.
    """

    def __init__(self, folder: str, level: int = 4, sample: float = 1.0) -> None:
        self._folder = folder
        self._control = Control(level, level, sample).words
        self._lock = threading.RLock()
        self._begin()
        weak = weakref.ref(self)

        def reset_in_child() -> None:
            recorder = weak()
            if recorder is not None:
                recorder._after_fork()

        os.register_at_fork(after_in_child=reset_in_child)

    def _begin(self) -> None:
        self.new_id: Callable[[], int] = id_source()
        self._lock = threading.RLock()  # for opening, defining and finding room only
        self._file: RingFile | None = None
        self._memory: Any = b""
        self._words: Any = [0] * 64
        self._words[layout.WORD_LEVEL : layout.WORD_SAMPLE + 1] = self._control
        self._mask = 0
        self._limit = 0
        # Numbers of slots that are free. Taking one is a single step, whatever thread does it.
        self._take = _NOTHING_LEFT
        # (type, number of links, has an error, class of each value...) -> how such a span is packed
        self._layouts: dict[tuple[Any, ...], tuple[_Pack, int, tuple[int, ...]]] = {}
        self._texts: dict[Any, int] = {None: 0}
        self._met: set[str] = set()
        self._closed = False

    def _after_fork(self) -> None:
        # The parent's ring belongs to the parent: closing the copy here does not release its lock.
        closed, file = self._closed, self._file
        if file is not None:
            self._control = (
                file.words[layout.WORD_LEVEL],
                file.words[layout.WORD_WANTED_LEVEL],
                file.words[layout.WORD_SAMPLE],
            )
        self._begin()
        self._closed = closed
        if file is not None:
            file.close()

    @property
    def level(self) -> int:
        """How much is to be recorded now, 0 to 4; another process may change it at any time."""
        return self._words[layout.WORD_LEVEL]  # type: ignore[no-any-return]

    @property
    def sample(self) -> int:
        """Of requests that no caller decided about, so many in 2**32 are wanted."""
        return self._words[layout.WORD_SAMPLE]  # type: ignore[no-any-return]

    def open(self) -> bool:
        """Makes this process a writer of the run; False where the run has ended."""
        with self._lock:
            if self._file is None and not self._closed:
                self._file = RingFile.make(self._folder, self._first_control())
                if self._file is None:
                    self._closed = True
                else:
                    self._memory, self._words = self._file.memory, self._file.words
                    self._limit = self._file.slots
                    self._mask = self._limit - 1
                    self._take = iter(range(1, self._limit + 1)).__next__
            return not self._closed

    def _first_control(self) -> tuple[int, int, int]:
        """What the run was last told; else what this recorder was made with."""
        told = run_control(self._folder)
        return told.words if told else self._control

    def request_begin(
        self,
        span_id: int,
        request_id: str,
        start_ns: int,
        context: TraceContext,
        name: str,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        self._write_text(
            [
                "R",
                span_id,
                request_id,
                start_ns,
                context.trace_id,
                context.parent_id,
                context.sampled,
                context.state,
                context.remote,
                name,
                dict(attributes),
            ]
        )

    def request_sent(self, span_id: int) -> None:
        number = self._next()
        if number:
            self._pack(layout.BEGIN.pack_into, number, layout.KIND_SENT, span_id, 0, 0, 0)

    def request_seen(self, key: int, request_id: str, time_ns: int) -> None:
        self._write_text(["A", key, request_id, time_ns])

    def span_begin(self, span_id: int, root_id: int, parent_id: int, type: SpanType, start_ns: int) -> None:
        found = self._layouts.get((type, 0, False)) or self._declare((type, 0, False))
        if found is None:
            return  # no room to say what it is: its end will say so in text
        number = self._next()
        if number:
            head = found[1] - layout.KIND_SPAN + layout.KIND_BEGIN
            offset = layout.SLOTS_OFFSET + ((number & self._mask) << layout.SLOT_SHIFT)
            _pack_begin(self._memory, offset, head, span_id, root_id, parent_id, start_ns, number)

    def span(
        self,
        span_id: int,
        root_id: int,
        parent_id: int,
        type: SpanType,
        start_ns: int,
        end_ns: int,
        values: Sequence[AttributeValue] = (),
        error: str = "",
        links: Sequence[int] = (),
    ) -> None:
        key = (type, len(links), error != "", *map(_class, values))
        try:
            pack_into, head, texts = self._layouts[key]
            words: Sequence[Any] = values
            if texts:
                words = [*values, error] if error else [*values]
                known = self._texts
                for position in texts:
                    words[position] = known[words[position]]
        except KeyError:
            self._span_slowly(key, span_id, root_id, parent_id, type, start_ns, end_ns, values, error, links)
            return
        try:
            number = self._take()
        except StopIteration:
            number = self._more_room()
            if not number:
                return
        try:
            pack_into(
                self._memory,
                _FIRST + ((number & self._mask) << 8),
                head,
                span_id,
                root_id,
                parent_id,
                start_ns,
                end_ns,
                *words,
                *links,
                number,
            )
        except struct.error:  # an integer beyond 64 bits
            self._void(number)
            self._write_text(
                _span_as_text(span_id, root_id, parent_id, type, start_ns, end_ns, error, values, links)
            )

    def make_current(self, root_id: int) -> object | None:
        return make_current(trace_id_of_root(root_id), root_id)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._take = _NOTHING_LEFT
            file, self._file = self._file, None
            if file is not None:
                # Another thread may be packing right now: the memory goes when nobody holds it.
                self._words = [0] * 64
                file.end()

    def _span_slowly(
        self,
        key: tuple[Any, ...],
        span_id: int,
        root_id: int,
        parent_id: int,
        type: SpanType,
        start_ns: int,
        end_ns: int,
        values: Sequence[AttributeValue],
        error: str,
        links: Sequence[int],
    ) -> None:
        """The first span of its layout, one with a new text or with many links, or one that does not fit."""
        own = len(values) + (error != "")
        if own <= layout.SPAN_WORDS < own + len(links):
            if self._write_links(span_id, links):
                self.span(span_id, root_id, parent_id, type, start_ns, end_ns, values, error)
            return
        texts = [value for value in values if isinstance(value, str)] + ([error] if error else [])
        defined = [text in self._texts or self._define_text(text) for text in texts]
        if self._declare(key) and all(defined):
            self.span(span_id, root_id, parent_id, type, start_ns, end_ns, values, error, links)
        else:
            self._write_text(
                _span_as_text(span_id, root_id, parent_id, type, start_ns, end_ns, error, values, links)
            )

    def _declare(self, key: tuple[Any, ...]) -> tuple[_Pack, int, tuple[int, ...]] | None:
        """How spans of this layout are packed; None where their values or the definitions have no room."""
        type, links, has_error, *classes = key
        codes = "".join(_CODE_OF.get(each, "?") for each in classes) + ("t" if has_error else "")
        if "?" in codes or len(codes) + links > layout.SPAN_WORDS:
            return None
        with self._lock:
            if key not in self._layouts:
                text = _encode([type.name, type.attributes, codes, has_error, links])
                index = self._define("L", text)
                if index is None:
                    return None
                texts = tuple(position for position, code in enumerate(codes) if code in "tn")
                head = layout.KIND_SPAN | index << layout.HEAD_SHIFT
                self._layouts[key] = (layout.span_struct(codes, links).pack_into, head, texts)
            return self._layouts[key]

    def _define_text(self, text: str) -> bool:
        """Whether the text has a number from here on."""
        with self._lock:
            if text in self._texts:
                return True
            if text not in self._met or len(text) > _LONGEST_TEXT:
                if len(self._met) >= _TEXTS_MET:
                    self._met.clear()
                self._met.add(text[:_LONGEST_TEXT])
                return False
            index = self._define("T", text)
            if index is not None:
                self._texts[text] = index
            return index is not None

    def _define(self, kind: str, text: str) -> int | None:
        return self._file.define(kind, text) if self.open() and self._file is not None else None

    def _write_links(self, span_id: int, links: Sequence[int]) -> bool:
        for start in range(0, len(links), layout.LINKS_WORDS):
            some = links[start : start + layout.LINKS_WORDS]
            number = self._next()
            if not number:
                return False
            padding = [0] * (layout.LINKS_WORDS - len(some))
            self._pack(layout.LINKS.pack_into, number, layout.KIND_LINKS, span_id, *some, *padding)
        return True

    def _write_text(self, record: list[Any]) -> None:
        """A record as JSON, over as many slots as it needs; the last one says that it is whole."""
        data = _encode(record).encode()
        key, size = self.new_id(), layout.TEXT_BYTES
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        for index, piece in enumerate(pieces):
            number = self._next()
            if not number:
                return
            kind = layout.KIND_PART if index + 1 < len(pieces) else layout.KIND_LONG
            self._pack(layout.TEXT.pack_into, number, kind, index & 0xFFFF, len(data), key, piece)

    def _next(self) -> int:
        """The number of a slot that is now the caller's to fill; 0, and one more dropped, if none is free."""
        try:
            return self._take()
        except StopIteration:
            return self._more_room()

    def _pack(self, pack_into: _Pack, number: int, *fields: Any) -> None:
        try:
            pack_into(self._memory, layout.SLOTS_OFFSET + ((number & self._mask) << 8), *fields, number)
        except struct.error:
            self._void(number)

    def _void(self, number: int) -> None:
        """Fills a slot whose record could not be packed: the reader shall not wait for it."""
        offset = layout.SLOTS_OFFSET + ((number & self._mask) << 8)
        layout.BEGIN.pack_into(self._memory, offset, layout.KIND_VOID, 0, 0, 0, 0, number)

    def _more_room(self) -> int:
        with self._lock:
            while self.open() and self._file is not None:
                try:
                    return self._take()  # another thread was faster, or the ring is new
                except StopIteration:
                    limit = self._file.words[layout.WORD_TAKEN] + self._mask + 1
                    if limit <= self._limit:
                        self._file.words[layout.WORD_DROPPED] += 1
                        return 0
                    self._take = iter(range(self._limit + 1, limit + 1)).__next__
                    self._limit = limit
            return 0


def _span_as_text(
    span_id: int,
    root_id: int,
    parent_id: int,
    type: SpanType,
    start_ns: int,
    end_ns: int,
    error: str,
    values: Sequence[AttributeValue],
    links: Sequence[int],
) -> list[Any]:
    ids = [span_id, root_id, parent_id]
    return ["S", *ids, type.name, type.attributes, start_ns, end_ns, error, [*values], [*links]]
