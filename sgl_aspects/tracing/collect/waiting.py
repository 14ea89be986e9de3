"""Entries that wait for a record of another process, by the id that they wait for."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

_Need = TypeVar("_Need", bound=Hashable)
_Entry = TypeVar("_Entry", bound="tuple[Any, ...]")


class Waiting(Generic[_Need, _Entry]):
    """The entries for each id, in order of arrival. ``count``: of all of them."""

    def __init__(self) -> None:
        self._by_need: dict[_Need, list[_Entry]] = {}
        self.count = 0

    def __contains__(self, need: _Need) -> bool:
        return need in self._by_need

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self._by_need)

    def begin(self, need: _Need) -> None:
        """Note an id that has no entry yet."""
        self._by_need.setdefault(need, [])

    def add(self, need: _Need, entry: _Entry) -> None:
        self._by_need.setdefault(need, []).append(entry)
        self.count += 1

    def take(self, need: _Need) -> list[_Entry]:
        """Remove and return the entries for an id."""
        found = self._by_need.pop(need, None) or []
        self.count -= len(found)
        return found

    def take_first(self) -> list[_Entry]:
        """Remove and return the entries of the id that came first."""
        return self.take(next(iter(self._by_need))) if self._by_need else []

    def take_older(self, since: float) -> Iterator[_Entry]:
        """Remove and return the entries that begin with a time up to this one."""
        late = list(itertools.takewhile(lambda need: self._by_need[need][0][0] <= since, self._by_need))
        for need in late:
            yield from self.take(need)
