"""The flight recorder: one memory-mapped ring of fixed-size records for each traced process.

A span is a few calls of C functions: no thread, no lock, no system call. The collector can read it even if
the process is killed the next moment. The package docstring describes the file.

It is safe without a lock because two operations are atomic under the GIL: taking the next number from a range
iterator, and packing a slot. The slot's last field, its mark, is written last: a slot whose mark is not its
number is unfinished. A slot is reused only after the collector has moved on; a writer that is a whole ring
ahead drops the newest record and counts it.
"""

from __future__ import annotations

import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from sgl_aspects.run.control import ASKED_OFFSET, LEVEL_MASK, Control, run_control
from sgl_aspects.tracing.context import enter as enter_span
from sgl_aspects.tracing.record import codec, native
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.file import RingFile
from sgl_aspects.tracing.record.open_steps import OpenSteps
from sgl_aspects.tracing.record.recorder import Recorder, SpanWriter, id_source
from sgl_aspects.tracing.records import AttributeValue, Event, ProcessDescribed, SpanType

_pack, _encode, _are_plain = layout.SLOT.pack_into, codec.encode, codec.PLAIN.issuperset
_class_of = type


class RingRecorder(Recorder):
    """The recorder of this process, with a ring.

    The file is made by ``open()`` or with the first record. A missing run folder means that the run has
    ended: recording then stops permanently. ``level`` and ``sample`` come from the control block.
    """

    def __init__(self, folder: str, level: int = 4, sample: float = 1.0) -> None:
        self.folder = folder
        self._control = Control(level, level, sample).words
        #: Called with the run folder for each record dropped because the ring was not read.
        self.when_full: Callable[[str], None] | None = None
        self._closed = False
        #: The free slots, each taken without a lock; the compiled path of a decode step takes some, too.
        self.slots = native.Slots()
        self._definitions: dict[SpanType | str, int] = {}  # of this process's file
        self._begin()
        weak = weakref.ref(self)

        def reset_in_child() -> None:
            recorder = weak()
            if recorder is not None:
                recorder._after_fork()

        os.register_at_fork(after_in_child=reset_in_child)

    def _begin(self) -> None:
        self.new_id: Callable[[], int] = id_source()
        self._lock = threading.RLock()  # for opening, defining and room only; a signal handler may record
        self._file: RingFile | None = None
        self._no_slots()
        self._open_steps(OpenSteps.in_memory(self._control))
        self._definitions.clear()

    def _after_fork(self) -> None:
        # The parent's ring belongs to the parent: closing the copy here does not release its lock.
        file = self._file
        if file is not None:
            words = self.steps.words
            level, wanted, sample = words[layout.WORD_LEVEL : layout.WORD_SAMPLE + 1].tolist()
            self._control = level & LEVEL_MASK, wanted, sample
        self._begin()
        if file is not None:
            file.close()

    def note_look(self) -> int:
        """Note in the control block that this process looks for requests; return the ring's slots."""
        file = self._file
        if file is None:
            return 0
        file.memory[ASKED_OFFSET] = 0
        return file.slots

    def open(self) -> bool:
        """Make this process a writer of the run; False if the run has ended."""
        return self._open_file() is not None

    def _no_slots(self) -> None:
        """Hand out no slots any more; a record that is just being written still goes to its slot."""
        self._last = 0
        self.slots.hand_out(1, 0, b"", 0)

    def make_room(self) -> bool:
        """Return whether slots are free again, because the collector has moved on; if not, count a lost
        record.
        """
        with self._lock:  # also for the file: another thread may be closing it
            file = self._open_file()
            if file is None:
                return False
            if operator.length_hint(self.slots):
                return True  # another thread was faster
            free = file.words[layout.WORD_TAKEN] + file.slots
            if free > self._last:
                place = (self._last + 1) % file.slots
                # Up to the file's last slot: offsets are contiguous until there.
                first, self._last = self._last + 1, self._last + min(free - self._last, file.slots - place)
                offset = layout.SLOTS_OFFSET + place * layout.SLOT_BYTES
                self.slots.hand_out(first, self._last, file.memory, offset)
                return True
            self._drop()
        self._ring_is_full()
        return False

    def _drop(self) -> None:
        """Count a record that is lost."""
        with self._lock:
            if self._file is not None:
                self._file.words[layout.WORD_DROPPED] += 1

    def _ring_is_full(self) -> None:
        # A collector that cannot start removes the run. Finding no slot costs each step tens of microseconds.
        if not os.path.isdir(self.folder):
            self.close()
        elif self.when_full is not None:
            self.when_full(self.folder)

    def _open_file(self) -> RingFile | None:
        with self._lock:
            if self._file is None and not self._closed:
                # The run's last setting, otherwise this recorder's initial one.
                setting = run_control(self.folder)
                self._file = RingFile.make(self.folder, setting.words if setting else self._control)
                if self._file is None:
                    self._closed = True
                else:
                    self._open_steps(OpenSteps(self._file.memory, self._file.words))
            return self._file

    def spans(self, type: SpanType) -> SpanWriter:
        """Return the writer of spans of this type."""

        def write(
            span_id: int,
            root_id: int,
            parent_id: int,
            start_ns: int,
            end_ns: int,
            values: Sequence[AttributeValue] = (),
            error: str = "",
            links: Sequence[int] = (),
        ) -> None:
            number = self._definitions.get(type) or self._define(type)
            if not _are_plain(map(_class_of, values)):
                values = codec.plain(values)
            if number:
                self._put((number, span_id, root_id, parent_id, start_ns, end_ns, values, error, links))

        return write

    def write(self, event: Event) -> None:
        fields = [self._numbered(each) if each.__class__ is dict else codec.plain(each) for each in event]
        self._put((codec.NAMES[type(event)], *fields))
        if isinstance(event, ProcessDescribed):
            with self._lock:
                if (file := self._open_file()) is not None:
                    file.define(codec.definition(event))  # for readers that come when it is overwritten

    def _numbered(self, attributes: dict[str, AttributeValue]) -> dict[int | str, AttributeValue]:
        """Return the attributes by the numbers of their names, which repeat with each request."""
        return {self.text(name) or name: codec.plain(value) for name, value in attributes.items()}

    def announce(self, type: SpanType, span_id: int, root_id: int, parent_id: int, start_ns: int) -> None:
        number = self._definitions.get(type) or self._define(type)
        if number:
            self._put((codec.BEGIN, number, span_id, root_id, parent_id, start_ns))

    def _put(self, record: tuple[Any, ...]) -> bool:
        """Write a record, in one slot if it fits; False if there was no room."""
        data = _encode(record)
        size = len(data)
        if size > layout.PART_BYTES:
            return self._put_in_parts(data)
        try:
            number, memory, offset = self.slots.take()
        except StopIteration:
            return self.make_room() and self._put(record)
        _pack(memory, offset, layout.KIND_RECORD, 0, 1, size, crc32(data), number, data, number)
        return True

    def _put_in_parts(self, data: bytes) -> bool:
        pieces = [data[at : at + layout.PART_BYTES] for at in range(0, len(data), layout.PART_BYTES)]
        if len(pieces) > layout.MOST_PARTS:
            self._drop()
            return False
        head, first, part = (len(pieces), len(data), crc32(data)), 0, 0
        while part < len(pieces):
            try:
                number, memory, offset = self.slots.take()
            except StopIteration:
                if not self.make_room():
                    return False
                continue
            first = first or number
            _pack(memory, offset, layout.KIND_RECORD, part, *head, first, pieces[part], number)
            part += 1
        return True

    def _open_steps(self, steps: OpenSteps) -> None:
        """Switch to these blocks for open steps."""
        before = getattr(self, "steps", None)
        self.steps = steps
        if before is not None:
            before.retire()

    def text(self, text: str) -> int:
        """Return the number of a text in this process's file."""
        return self._definitions.get(text) or self._define(text)

    def _define(self, what: SpanType | str) -> int:
        """Add a definition to the file, if it is not there; 0 if there is no room, or no file any more."""
        with self._lock:
            file = self._open_file()
            if what not in self._definitions and file is not None:
                number = file.define(codec.definition(what))
                if number is None:
                    self._drop()
                    return 0
                self._definitions[what] = number
            return self._definitions.get(what, 0)

    def write_group(self, key: int, links: Sequence[int]) -> bool:
        """Write the keys of the requests that steps of this group link to."""
        return self._put((codec.GROUP, key, (*links,)))

    def end_step(self, steps: OpenSteps, block: int) -> None:
        """Copy the step into a slot."""
        try:
            number, memory, offset = self.slots.take()
        except StopIteration:
            if self.make_room():
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
                self._file.words[layout.WORD_DETACHING_NS] = time.monotonic_ns()

    def close(self, *, detaches: bool = False) -> None:
        with self._lock:
            self._closed = True
            self._no_slots()
            file, self._file = self._file, None
            if file is not None:
                # Another thread may be packing now: the memory is released with its last reference.
                self._control = 0, 0, 0
                self._open_steps(OpenSteps.in_memory(self._control))
                file.end(layout.DETACHED if detaches else layout.CLOSED)
