"""The flight recorder: one memory-mapped ring of fixed-size records for each traced process.

A span is one ``pack_into`` of numbers: no thread, no lock, no encoding, no system call. The collector can
read it even if the process is killed the next moment. docs/recorder.md describes the file.

It is safe without a lock because two operations are atomic under the GIL: taking the next number from a range
iterator, and packing a slot. The slot's last field, its mark, is written last: a slot whose mark is not its
number is unfinished. A slot is reused only after the collector has moved on; a writer that is a whole ring
ahead drops the newest record and counts it.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sgl_aspects.run.control import Control, run_control
from sgl_aspects.tracing.context import enter_span
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.file import RingFile
from sgl_aspects.tracing.record.open_steps import OpenSteps
from sgl_aspects.tracing.record.recorder import SpanWriter, id_source
from sgl_aspects.tracing.record.slots import Slots
from sgl_aspects.tracing.record.span_writers import Layouts, codes_of, make_writer, shape, writer_by_values
from sgl_aspects.tracing.records import (
    Event,
    ProcessDescribed,
    RequestBegin,
    RequestElsewhere,
    RequestSeen,
    SpanEnd,
    SpanType,
)
from sgl_aspects.tracing.schema import BEGIN_TYPES, REQUEST_ID

# Values that JSON cannot represent (a tensor's number given as a seed, say) are written as text.
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
# A text is defined at its second occurrence: ids that occur once do not fill the definitions.
_TEXTS_MET = 4096
_LONGEST_TEXT = 200
# Cap on defined groups of attribute names, such as those of requests.
_NAMES_DEFINED = 64
# Cap on combinations of a request's attributes and their types, each with a layout.
_REQUEST_LAYOUTS = 64
_LOW_HALF = (1 << 64) - 1


class RingRecorder:
    """The recorder of this process: a :class:`~sgl_aspects.tracing.record.recorder.Recorder` over a ring.

    The file is made by ``open()`` or with the first record. A missing run folder means that the run has
    ended: recording then stops permanently. ``level`` and ``sample`` come from the control block.
    """

    def __init__(self, folder: str, level: int = 4, sample: float = 1.0) -> None:
        self._folder = folder
        self._control = Control(level, level, sample).words
        #: Called with the run folder for each record dropped because the ring was not read.
        self.when_full: Callable[[str], None] | None = None
        self._closed = False
        self._slots = Slots(self._open_file, self._ring_is_full)
        #: The slots of the compiled path of a decode step.
        self.free_slots = self._slots.free
        self._writers: dict[SpanType, SpanWriter] = {}
        self._layouts: dict[SpanType, Layouts] = {}
        self._begins: dict[SpanType, int] = {}  # the first word of their slots
        self._texts: dict[Any, int] = {}  # and of lists, as tuples that begin with their type
        self._requests: dict[tuple[Any, ...], SpanWriter] = {}
        self._names: dict[tuple[str, ...], int] = {}  # types of records written as text
        self._met: set[str] = set()
        self._begin()
        weak = weakref.ref(self)

        def reset_in_child() -> None:
            recorder = weak()
            if recorder is not None:
                recorder._after_fork()

        os.register_at_fork(after_in_child=reset_in_child)

    def _begin(self) -> None:
        self.new_id: Callable[[], int] = id_source()
        self._lock = threading.RLock()  # for opening and defining only
        self._file: RingFile | None = None
        self._open_steps(self._steps_in_memory())
        # Of one file; the writers keep references to these dictionaries.
        self._begins.clear()
        self._names.clear()
        self._texts.clear()
        self._texts[None] = 0
        for layouts in self._layouts.values():
            layouts.clear()

    def _after_fork(self) -> None:
        # The parent's ring belongs to the parent: closing the copy here does not release its lock.
        file = self._file
        if file is not None:
            words = self.steps.words
            level, wanted, sample = words[layout.WORD_LEVEL : layout.WORD_SAMPLE + 1].tolist()
            self._control = level, wanted, sample
        self._slots.forget()
        self._begin()
        if file is not None:
            file.close()

    @property
    def level(self) -> int:
        """The recording level, 0 to 4; another process may change it at any time."""
        return self.steps.words[layout.WORD_LEVEL]  # type: ignore[no-any-return]

    @property
    def sample(self) -> int:
        """The sampled share of requests without a caller's decision, times 2**32."""
        return self.steps.words[layout.WORD_SAMPLE]  # type: ignore[no-any-return]

    def open(self) -> bool:
        """Make this process a writer of the run; False if the run has ended."""
        return self._open_file() is not None

    def _ring_is_full(self) -> None:
        if self.when_full is not None:
            self.when_full(self._folder)

    def _open_file(self) -> RingFile | None:
        with self._lock:
            if self._file is None and not self._closed:
                # The run's last setting, otherwise this recorder's initial one.
                setting = run_control(self._folder)
                self._file = RingFile.make(self._folder, setting.words if setting else self._control)
                if self._file is None:
                    self._closed = True
                else:
                    self._open_steps(OpenSteps(self._file.memory, self._file.words))
            return self._file

    def spans(self, type: SpanType) -> SpanWriter:
        """Return the writer of spans of this type."""
        with self._lock:
            if type not in self._writers:
                self._writers[type] = self._make_writer(type)
            return self._writers[type]

    def _make_writer(self, type: SpanType, record: str = "S") -> SpanWriter:
        if object in type.attributes.values() and record == "S":
            return writer_by_values(type, self._make_writer)
        return make_writer(
            codes_of(type) or "",
            self._slots,
            self._texts,
            self._layouts.setdefault(type, {}),
            functools.partial(self._learn, record, type),
            functools.partial(self._write_as_text, record, type),
        )

    def write(self, event: Event) -> None:
        if isinstance(event, RequestBegin):
            self._write_request(*event)
        elif isinstance(event, RequestSeen):
            key, request_id, time_ns = event
            data = request_id.encode("utf-8", "surrogatepass")
            if len(data) < layout.SEEN_BYTES:
                self._slots.fill(layout.SEEN.pack_into, layout.KIND_SEEN, key, time_ns, data)
            else:
                self._write_text(["A", *event])
        elif isinstance(event, RequestElsewhere):
            self._write_text(["E", *event])
        elif isinstance(event, ProcessDescribed):
            self._write_text(["P", *event])
        else:
            self._slots.fill_begin(layout.KIND_SENT, event.span_id, 0, 0, 0)

    def _write_request(
        self,
        span_id: int,
        request_id: str,
        start_ns: int,
        trace_id: int,
        parent_id: int,
        sampled: bool,
        trace_state: str,
        remote: bool,
        name: str,
        attributes: Mapping[str, Any],
    ) -> None:
        """Write a request like a span; if its id is none of the attributes, under an empty name."""
        if attributes.get(REQUEST_ID) != request_id:
            attributes = {**attributes, "": request_id}
        kinds = (*attributes, *map(type, attributes.values()))
        write = self._requests.get(kinds) or self._request_writer(kinds, attributes)
        values = (sampled | remote << 1, name, *attributes.values())
        write(span_id, trace_id >> 64, trace_id & _LOW_HALF, parent_id, start_ns, values, trace_state, ())

    def _request_writer(self, kinds: tuple[Any, ...], attributes: Mapping[str, Any]) -> SpanWriter:
        types = {key: BEGIN_TYPES.get(key, type(value)) for key, value in attributes.items()}
        kind = SpanType("", {" flags": int, " name": str, **types})
        with self._lock:
            if len(self._requests) >= _REQUEST_LAYOUTS:
                return functools.partial(self._write_as_text, "R", kind)
            writer = self._requests[kinds] = self._writers[kind] = self._make_writer(kind, "R")
            return writer

    def announce(self, type: SpanType, span_id: int, root_id: int, parent_id: int, start_ns: int) -> None:
        head = self._begins.get(type) or self._declare_begin(type)
        if head:
            self._slots.fill_begin(head, span_id, root_id, parent_id, start_ns)

    def open_span(self, type: SpanType, span_id: int, root_id: int, parent_id: int, start_ns: int) -> None:
        """Return None: a ring has no objects for spans."""

    def _open_steps(self, steps: OpenSteps) -> None:
        """Switch to these blocks for open steps."""
        before = getattr(self, "steps", None)
        self.steps = steps
        if before is not None:
            before.retire()

    def _steps_in_memory(self) -> OpenSteps:
        """Switch to memory without a file: before it is made, and after the end."""
        steps = OpenSteps.in_memory()
        for word, value in enumerate(self._control, layout.WORD_LEVEL):
            steps.words[word] = value
        return steps

    def text(self, text: str) -> int:
        """Return the number of a text in this process's file."""
        with self._lock:
            if text not in self._texts:
                index = self._define("T", text[:_LONGEST_TEXT])
                if index is None:
                    return 0
                self._texts[text] = index
            return self._texts[text]

    def write_group(self, key: int, links: Sequence[int]) -> bool:
        """Write the keys of the requests that steps of this group link to."""
        return self._write_links(layout.KIND_GROUP, key, links)

    def end_step(self, steps: OpenSteps, block: int) -> None:
        """Copy the step into a slot."""
        try:
            number, memory, offset = self._slots.take()
        except StopIteration:
            if self._slots.make_room():
                self.end_step(steps, block)
                return
        else:
            start = block * 8
            memory[offset : offset + layout.MARK_OFFSET] = steps.memory[start : start + layout.MARK_OFFSET]
            layout.MARK.pack_into(memory, offset + layout.MARK_OFFSET, number)
        steps.words[block] = 0

    #: Enter a span without a record: it is written when it ends.
    enter = staticmethod(enter_span)

    def detaching(self) -> None:
        """Mark the process as detaching: requests that end later may lack some spans."""
        with self._lock:
            if self._file is not None and not self._file.words[layout.WORD_DETACHING_NS]:
                self._file.words[layout.WORD_DETACHING_NS] = time.time_ns()

    def close(self, *, detaches: bool = False) -> None:
        """Close the file. ``detaches``: the process goes on untraced, so its open spans have not failed."""
        with self._lock:
            self._closed = True
            self._slots.close()
            self._writers.clear()  # they refer to this recorder: without them it is freed at once
            self._requests.clear()
            file, self._file = self._file, None
            if file is not None:
                # Another thread may be packing now: the memory is released with its last reference.
                self._control = 0, 0, 0
                self._open_steps(self._steps_in_memory())
                file.end(layout.DETACHED if detaches else layout.CLOSED)

    def _learn(self, record: str, type: SpanType, *fields: Any) -> None:
        """Prepare a span with a new text or layout, too few values, or many links, then write it."""
        span = SpanEnd(type, *fields)
        values = [*span.values[: len(type.attributes)]]
        values += [None] * (len(type.attributes) - len(values))
        links, has_error = span.links, span.error != ""
        own = layout.span_words(codes_of(type) or "") + has_error
        if own <= layout.SPAN_WORDS < own + len(links):
            if not self._write_links(layout.KIND_LINKS, span.span_id, links):
                return
            links = ()
        span = span._replace(values=values, links=links)
        texts = [
            (value, kind)
            for value, kind in zip(values, type.attributes.values())
            if kind in (str, list, tuple)
        ]
        if self._declare(record, type, len(links), has_error) and self._define_texts(
            [*texts, (span.error or None, str)]
        ):
            self.spans(type)(*span[1:])
        else:
            self._write_as_text(record, *span)

    def _declare(self, record: str, type: SpanType, links: int, has_error: bool) -> bool:
        """Declare a layout for spans with ``links`` links; False if it does not fit."""
        with self._lock:
            layouts = self._layouts.setdefault(type, {})
            if shape(links, has_error) in layouts:
                return True
            codes = codes_of(type)
            if codes is None or layout.span_words(codes) + has_error + links > layout.SPAN_WORDS:
                return False
            index = self._define("L", _encode([type.name, [*type.attributes], codes, has_error, links]))
            if index is None:
                return False
            head = (layout.KIND_SPAN if record == "S" else layout.KIND_REQUEST) | index << layout.HEAD_SHIFT
            layouts[shape(links, has_error)] = layout.span_struct(codes, has_error, links).pack_into, head
            return True

    def _declare_begin(self, type: SpanType) -> int:
        """Return the first word of the slots that announce such a span; 0 if it does not fit."""
        index = self._define("L", _encode([type.name, [*type.attributes], "", False, 0]))
        if index is None:
            return 0
        head = self._begins[type] = layout.KIND_BEGIN | index << layout.HEAD_SHIFT
        return head

    def _define_texts(self, texts: Sequence[tuple[Any, type]]) -> bool:
        """Define the texts and lists of texts; False unless each is one or None, and has a number."""
        defined = [
            text is None
            or (kind is str and isinstance(text, str) and self._define_text(text, "T", text))
            or (
                kind is not str
                and text.__class__ in (list, tuple)
                and all(isinstance(each, str) for each in text)
                and self._define_text((text.__class__, *text), "J", _encode(text))
            )
            for text, kind in texts
        ]
        return all(defined)

    def _define_text(self, key: Any, kind: str, text: str) -> bool:
        with self._lock:
            if key in self._texts:
                return True
            if text not in self._met or len(text) > _LONGEST_TEXT:
                if len(self._met) >= _TEXTS_MET:
                    self._met.clear()
                self._met.add(text[:_LONGEST_TEXT])
                return False
            index = self._define(kind, text)
            if index is not None:
                self._texts[key] = index
            return index is not None

    def _define(self, kind: str, text: str) -> int | None:
        with self._lock:
            file = self._open_file()
            return None if file is None else file.define(kind, text)

    def _write_links(self, kind: int, key: int, links: Sequence[int]) -> bool:
        for start in range(0, len(links), layout.LINKS_WORDS):
            some = links[start : start + layout.LINKS_WORDS]
            padding = [0] * (layout.LINKS_WORDS - len(some))
            if not self._slots.fill(layout.LINKS.pack_into, kind, key, *some, *padding):
                return False
        return True

    def _write_as_text(self, record: str, type: SpanType, *fields: Any) -> None:
        self._write_text([record, type.name, self._names_of(type.attributes), *fields])

    def _names_of(self, attributes: Mapping[str, Any]) -> int | list[str]:
        """Return the number of the group of names; the names if there is no room or they are too many."""
        names = (*attributes,)
        index = self._names.get(names)
        if index is None:
            if len(self._names) >= _NAMES_DEFINED:
                return [*names]
            index = self._names[names] = self._define("L", _encode(["", names, "", False, 0])) or 0
        return index or [*names]

    def _write_text(self, record: list[Any]) -> None:
        """Write a record as JSON over as many slots as it needs; the last one marks it as complete."""
        data = _encode(record).encode()
        key, size = self.new_id(), layout.TEXT_BYTES
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        if len(pieces) > 1 << 16:
            self._slots.drop()
            return
        for index, piece in enumerate(pieces):
            kind = layout.KIND_PART if index + 1 < len(pieces) else layout.KIND_LONG
            if not self._slots.fill(layout.TEXT.pack_into, kind, index, len(data), key, piece):
                return
