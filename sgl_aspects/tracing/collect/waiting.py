"""Records that wait for another process's record, by the id that they wait for."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from sgl_aspects.tracing.collect.reader import RingReader as Writer
from sgl_aspects.tracing.records import RequestSeen, SpanEnd

_Need = TypeVar("_Need", bound=Hashable)
_Record = TypeVar("_Record", SpanEnd, RequestSeen)


class WaitingRecords(Generic[_Need, _Record]):
    """The entries for one id, in order of arrival: since when, writer, record."""

    def __init__(self) -> None:
        self._by_need: dict[_Need, list[tuple[float, Writer, _Record]]] = {}
        self.count = 0

    def add(self, need: _Need, since: float, writer: Writer, record: _Record) -> None:
        """Add an entry. ``since``: of ``time.monotonic``."""
        self._by_need.setdefault(need, []).append((since, writer, record))
        self.count += 1

    def take(self, need: _Need) -> list[tuple[float, Writer, _Record]]:
        """Remove and return the entries for an id that has arrived."""
        found = self._by_need.pop(need, None) or []
        self.count -= len(found)
        return found

    def take_older(self, since: float) -> Iterator[tuple[float, Writer, _Record]]:
        """Remove and return the entries that have waited since before that time."""
        late = []
        for need, waiting in self._by_need.items():
            if waiting[0][0] > since:
                break
            late.append(need)
        for need in late:
            yield from self.take(need)

    def take_first(self) -> list[tuple[float, Writer, _Record]]:
        """Remove and return the entries of the id that was waited for first."""
        return self.take(next(iter(self._by_need))) if self._by_need else []
