"""Follows the rings of a run as processes come and go, and how far their spans are delivered."""

from __future__ import annotations

import os
import resource
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sgl_aspects.run.folder import CLOSING
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.export.failures import report_line
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.codec import DamagedError
from sgl_aspects.tracing.records import Record

if TYPE_CHECKING:
    from sgl_aspects.tracing.export.pipelines import Pipeline

# Cap on open rings of ended processes: each takes up memory and a file descriptor.
_STAYING = 64
# Files that other code in this process may have open.
_OTHERS = 64


class RunReader:
    """Follows every ring of a run folder. ``writers``: those not read to their end yet, by name."""

    def __init__(self, folder: str, *, keeps_all: bool = False) -> None:
        self._folder = Path(folder)
        self._keeps_all = keeps_all
        self._known: set[str] = set()
        self._gone: deque[RingReader] = deque()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = 1 << 20 if limit == resource.RLIM_INFINITY else max(2, limit - _OTHERS)
        self._damaged = self._dropped = 0  # of those in neither `writers` nor `_gone`
        self.writers: dict[str, RingReader] = {}
        self.lock = threading.Lock()  #: Held while what is read is counted.
        self.has_more = self._is_full = False
        #: Whether the run was closed.
        self.is_closing = False

    @property
    def damaged(self) -> int:
        return self._damaged + sum(writer.damaged for writer in self.open())

    @property
    def dropped(self) -> int:
        return self._dropped + sum(writer.dropped + writer.lost for writer in self.open())

    def open(self) -> list[RingReader]:
        """Return the rings that are open, those of ended processes first."""
        return [*list(self._gone), *list(self.writers.values())]

    def poll_rings(self) -> Iterator[tuple[RingReader, list[Record]]]:
        """Read what was written since the last call, each ring's records at once; their slots are the
        writer's again after ``commit``. ``has_more`` afterwards: some ring has a lot left to read.

        Rings of processes that get requests are read last but yielded first: a caller's records precede
        what others wrote of the same request.
        """
        for writer in self.find():  # first, since spans name their rank if there are several
            yield writer, [*writer.descriptions()]
        writers = sorted(self.writers.values(), key=lambda writer: not writer.gets_requests)
        read = [(writer, *writer.poll(writer.is_alive())) for writer in reversed(writers)]
        self.has_more = any(more for *_, more in read)
        for writer, records, _ in reversed(read):
            yield writer, records

    def positions(self) -> dict[str, int]:
        """Return the number of the last record read in each ring."""
        return {writer.name: writer.taken for writer in self.writers.values()}

    def commit(self, delivered: Mapping[str, int]) -> None:
        """Release the records up to these numbers to their writers."""
        for writer in self.writers.values():
            writer.commit(delivered.get(writer.name, 0))

    def is_behind(self) -> bool:
        """Return whether a ring fills faster than it is read."""
        return any(writer.is_behind() for writer in self.writers.values())

    def living(self) -> list[RingReader]:
        """The writers whose processes are alive."""
        self.find()
        return [writer for writer in self.writers.values() if writer.is_alive()]

    def take_ended(self) -> list[RingReader]:
        """Return the writers whose processes are gone and that are read to their end, each once."""
        ended = [writer for writer in self.writers.values() if writer.is_exhausted]
        for writer in ended:
            self._retire(writer)
        self.has_more = self.has_more or (self._is_full and bool(ended))
        return ended

    def _retire(self, writer: RingReader) -> None:
        """Close the older rings of ended processes; the latest stay open for dumps."""
        del self.writers[writer.name]
        self._gone.append(writer)
        if len(self._gone) > min(_STAYING, self._most // 2):
            oldest = self._gone.popleft()
            self._dropped += oldest.dropped + oldest.lost
            self._damaged += oldest.damaged
            oldest.close()
            if not self._keeps_all:
                oldest.path.unlink(missing_ok=True)

    def close(self) -> None:
        for writer in self.open():
            writer.close()

    def find(self) -> list[RingReader]:
        """Scan the folder for new rings and open them."""
        found: list[RingReader] = []
        try:
            names = set(os.listdir(self._folder))
        except FileNotFoundError:
            return found
        self.is_closing, self._is_full = CLOSING in names, False
        for name in sorted(name for name in names - self._known if name.endswith(layout.SUFFIX)):
            if len(self.open()) >= self._most:
                self._is_full = True  # the rest once some of these have ended
                break
            self._known.add(name)
            try:
                reader = RingReader(self._folder / name)
            except (DamagedError, OSError) as error:
                self._damaged += 1
                report_line(f"{error}; what is in it is lost")
            else:
                self.writers[reader.name] = reader
                found.append(reader)
        if found:
            # First the process that gets the requests: its scheduler's records need not wait then.
            self.writers = dict(sorted(self.writers.items(), key=lambda item: item[1].started_ns))
        return found


class _Pass(NamedTuple):
    """A pass over all rings: how many spans each pipeline had been given by its end, and the positions up to
    which no span is missing among them.
    """

    given: list[int]
    positions: Mapping[str, int]


class Deliveries:
    """Positions in the rings, by writer, up to which every exporter has taken the spans or given them up.

    A request's end waits for one more pass (:mod:`.join`), so a pass completes the spans of the records that
    were read before it.
    """

    def __init__(self, pipelines: Sequence[Pipeline]) -> None:
        self._pipelines = pipelines
        self._passes: deque[_Pass] = deque()
        self._read: Mapping[str, int] = {}
        self.positions: Mapping[str, int] = {}

    def pass_ended(self, read: Mapping[str, int]) -> None:
        """Note the end of a pass, with the number of the last record read in each ring."""
        given = [pipeline.given for pipeline in self._pipelines]
        if self._passes and self._passes[-1].given == given:
            self._passes.pop()  # nothing came in between
        self._passes.append(_Pass(given, self._read))
        self._read = read
        while self._passes and all(
            pipeline.done >= given for pipeline, given in zip(self._pipelines, self._passes[0].given)
        ):
            self.positions = self._passes.popleft().positions
