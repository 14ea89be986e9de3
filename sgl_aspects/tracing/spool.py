"""Storage, version 1: each process appends its records to files of its own, the collector follows them.

A record is one line of JSON (a list; the first item says which record), handed to the kernel in one
write, so it is there for the collector even if the writer is killed the next moment. A
line that was cut short is skipped. Files are segments ``<writer>.<number>.spool``: a writer goes on to
the next one after ``SEGMENT_BYTES``, the collector deletes what it has read, and a writer that is
``SEGMENTS`` ahead of the collector drops and counts instead of filling the disk.

A writer holds a POSIX lock on its segments. The kernel releases it when the process is gone, however it
went, and no other process with the same number can be taken for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.recorder import id_source
from sgl_aspects.tracing.records import (
    AttributeValue,
    Dropped,
    Record,
    RequestBegin,
    RequestSeen,
    RequestSent,
    SpanBegin,
    SpanEnd,
    SpanType,
)

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 4 << 20
SEGMENTS = 4
SUFFIX = ".spool"
_READ_BYTES = 1 << 20

# Values that JSON has no word for (a tensor's number given as a seed, say) are written as text.
_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode


class SpoolRecorder:
    """The recorder of this process: a :class:`~sgl_aspects.tracing.recorder.Recorder` over spool files.

    The first file is made by ``open()`` or with the first record. A run folder that is gone means that
    the run has ended: recording then stops for good.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._begin()
        weak = weakref.ref(self)

        def reset_in_child() -> None:
            recorder = weak()
            if recorder is not None:
                recorder._after_fork()

        os.register_at_fork(after_in_child=reset_in_child)

    def _begin(self) -> None:
        self.new_id: Callable[[], int] = id_source()
        self._writer = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._lock = threading.RLock()  # for opening and declaring only: a record is one atomic append
        self._descriptors: list[int] = []
        self._current = -1
        self._segment = 0
        self._size = 0
        self._types: dict[SpanType, int] = {}
        self._dropped = 0
        self._closed = False

    def _after_fork(self) -> None:
        # The parent's lock belongs to the parent's process: closing the copies does not release it.
        closed, descriptors = self._closed, self._descriptors
        self._begin()
        self._closed = closed
        for descriptor in descriptors:
            os.close(descriptor)

    def open(self) -> bool:
        """Makes this process a writer of the run; False where the run has ended."""
        with self._lock:
            if self._current < 0 and not self._closed:
                self._next_segment()
            return not self._closed

    def request_begin(
        self,
        span_id: int,
        request_id: str,
        start_ns: int,
        context: TraceContext,
        name: str,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        self._write(
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
        self._write(["N", span_id])

    def request_seen(self, key: int, request_id: str, time_ns: int) -> None:
        self._write(["A", key, request_id, time_ns])

    def span_begin(self, span_id: int, root_id: int, parent_id: int, type: SpanType, start_ns: int) -> None:
        index = self._types.get(type)
        if index is None:
            index = self._declare(type)
        self._write(["B", span_id, root_id, parent_id, index, start_ns])

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
        index = self._types.get(type)
        if index is None:
            index = self._declare(type)
        self._write(["S", span_id, root_id, parent_id, index, start_ns, end_ns, error, values, links])

    def close(self) -> None:
        with self._lock:
            if self._dropped and self._current >= 0:
                self._size = 0  # this one record is written whatever the file's size
                self._write(["D", self._dropped])
            self._closed = True
            self._current = -1
            for descriptor in self._descriptors:
                os.close(descriptor)
            self._descriptors.clear()

    def _declare(self, type: SpanType) -> int:
        with self._lock:
            index = self._types.get(type)
            if index is None:
                index = len(self._types)
                self._write(["T", index, type.name, type.attributes])
                self._types[type] = index
        return index

    def _write(self, record: list[Any]) -> None:
        if self._current < 0 and not self.open():
            return
        line = (_encode(record) + "\n").encode()
        if self._size > SEGMENT_BYTES and not self._make_room():
            self._dropped += 1
            return
        try:
            written = os.write(self._current, line)
        except OSError:  # the disk is full, or another thread has just closed the recorder
            self._dropped += 1
            return
        self._size += written
        if written != len(line):
            # Cut short: the line break makes the next record readable.
            self._dropped += 1
            with contextlib.suppress(OSError):
                os.write(self._current, b"\n")

    def _make_room(self) -> bool:
        with self._lock:
            if self._size <= SEGMENT_BYTES:
                return True  # another thread was faster
            if self._closed or os.path.exists(self._path(self._segment - SEGMENTS)):
                return False  # the collector is that far behind
            if not self._next_segment():
                return False
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                self._write(["D", dropped])
            return True

    def _path(self, segment: int) -> str:
        return os.path.join(self._folder, f"{self._writer}.{segment}{SUFFIX}")

    def _next_segment(self) -> bool:
        """Opens the next file; it gets its name once it is locked, so nobody sees an unlocked one.

        False, for good, where that cannot be: the run folder is gone.
        """
        path = self._path(self._segment + 1)
        try:
            descriptor = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            self._descriptors.append(descriptor)
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, (_encode(["H", 1, os.getpid()]) + "\n").encode())
            os.rename(path + ".new", path)
        except OSError as error:
            self._closed = True
            if not isinstance(error, FileNotFoundError):
                logger.warning("tracing stops in process %d: %s", os.getpid(), error)
            return False
        self._segment += 1
        self._size = 0
        self._current = descriptor
        # A thread may still be writing to the file before: it is closed with the next change.
        if len(self._descriptors) > 2:
            os.close(self._descriptors.pop(0))
        return True


class Writer:
    """What the collector knows of one writing process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process_id = int(name.partition("-")[0])
        self.types: dict[int, SpanType] = {}
        self.last_ns = 0
        self.segments: dict[int, _Segment] = {}

    def is_alive(self) -> bool:
        """Whether a process still holds the lock of the newest segment."""
        return self.segments[max(self.segments)].is_locked()


class _Segment:
    """One file, read to where it was last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._tail = b""

    def read_lines(self) -> tuple[list[bytes], bool]:
        """The whole lines that are new, and whether there may be more to read at once."""
        data = os.read(self._descriptor, _READ_BYTES)
        lines = (self._tail + data).split(b"\n")
        self._tail = lines.pop()
        return lines, len(data) == _READ_BYTES

    def is_locked(self) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        os.close(self._descriptor)


class SpoolReader:
    """Follows every spool file of a run folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._more = False
        self.writers: dict[str, Writer] = {}
        self.damaged = 0
        self.has_more = False

    def poll(self) -> Iterator[tuple[Writer, Record]]:
        """What was written since the last time. ``has_more`` afterwards: some file has a lot left to read."""
        self._find()
        self.has_more = False
        for writer in list(self.writers.values()):
            for number in sorted(writer.segments):
                more = True
                segment = writer.segments[number]
                lines, more = segment.read_lines()
                for line in lines:
                    record = self._decode(writer, line)
                    if record is not None:
                        yield writer, record
                if more:
                    self.has_more = True
                    break
                if number <= max(writer.segments) - 2:
                    segment.close()
                    segment.path.unlink(missing_ok=True)
                    del writer.segments[number]

    def living(self) -> list[Writer]:
        """The writers whose processes are still there."""
        self._find()
        return [writer for writer in self.writers.values() if writer.is_alive()]

    def close(self) -> None:
        for writer in self.writers.values():
            for segment in writer.segments.values():
                segment.close()

    def _find(self) -> None:
        for path in sorted(self._folder.glob("*" + SUFFIX)):
            name, _, number = path.name[: -len(SUFFIX)].partition(".")
            writer = self.writers.get(name)
            if writer is None:
                writer = self.writers[name] = Writer(name)
            if int(number) not in writer.segments:
                writer.segments[int(number)] = _Segment(path)

    def _decode(self, writer: Writer, line: bytes) -> Record | None:
        """The record in a line; None for the file's own lines and for what is damaged."""
        try:
            kind, *fields = json.loads(line)
            if kind == "T":
                writer.types[fields[0]] = SpanType(fields[1], tuple(fields[2]))
                return None
            if kind == "H":
                return None
            if kind in ("B", "S"):
                fields[3] = writer.types[fields[3]]
            record: Record = _RECORDS[kind](*fields)
        except (ValueError, TypeError, KeyError, IndexError):
            self.damaged += 1
            return None
        writer.last_ns = max(writer.last_ns, _time_of(record))
        return record


_RECORDS: dict[str, Callable[..., Any]] = {
    "R": RequestBegin,
    "N": RequestSent,
    "A": RequestSeen,
    "B": SpanBegin,
    "S": SpanEnd,
    "D": Dropped,
}


def _time_of(record: Record) -> int:
    if isinstance(record, SpanEnd):
        return record.end_ns
    if isinstance(record, (RequestBegin, SpanBegin)):
        return record.start_ns
    return record.time_ns if isinstance(record, RequestSeen) else 0
