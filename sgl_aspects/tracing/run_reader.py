"""The rings of a run, followed as processes come and go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from sgl_aspects.tracing import ring_format as layout
from sgl_aspects.tracing.records import Record
from sgl_aspects.tracing.ring_decoder import DamagedError
from sgl_aspects.tracing.ring_reader import RingReader
from sgl_aspects.tracing.run_folder import CLOSING

_TICKS_NS = 100_000_000


class RunReader:
    """Follows every ring of a run folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._refused: set[Path] = set()
        self.writers: dict[str, RingReader] = {}
        self.has_more = False
        #: Whether the run was told to end.
        self.is_closing = False
        self._changed = self._looked = 0

    @property
    def damaged(self) -> int:
        return len(self._refused) + sum(writer.damaged for writer in self.writers.values())

    @property
    def dropped(self) -> int:
        return sum(writer.dropped for writer in list(self.writers.values()))

    def poll(self) -> Iterator[tuple[RingReader, Record]]:
        """What was written since the last time. ``has_more`` afterwards: some ring has a lot left to read."""
        self.find()
        self.has_more = False
        for writer in list(self.writers.values()):
            before = writer.taken
            records, more = writer.poll(writer.is_alive())
            self.has_more = self.has_more or more
            if writer.taken != before:  # also by parts of records, which are none yet
                writer.commit()
            for record in records:
                yield writer, record

    def living(self) -> list[RingReader]:
        """The writers whose processes are still there."""
        self.find()
        return [writer for writer in self.writers.values() if writer.is_alive()]

    def close(self) -> None:
        for writer in self.writers.values():
            writer.close()

    def find(self) -> list[RingReader]:
        """Looks what is new in the folder, and opens its new rings."""
        found: list[RingReader] = []
        # A folder's time is as exact as the kernel's ticks: what has changed just now is looked at again.
        try:
            changed, now = self._folder.stat().st_mtime_ns, time.time_ns()
        except FileNotFoundError:
            return found
        if changed == self._changed and self._looked - changed > _TICKS_NS:
            return found
        self._changed, self._looked = changed, now
        self.is_closing = self._folder.joinpath(CLOSING).exists()
        for path in sorted(self._folder.glob("*" + layout.SUFFIX)):
            name = path.name.removesuffix(layout.SUFFIX)
            if name in self.writers or path in self._refused:
                continue
            try:
                reader = self.writers[name] = RingReader(path)
                found.append(reader)
            except (DamagedError, OSError):
                self._refused.add(path)
        return found
