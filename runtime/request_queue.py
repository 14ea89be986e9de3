"""RequestQueue: the requests that wait, in the order in which they are served."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from sgl_aspects.runtime.batch import Req


class RequestQueue:
    """By priority, and among equals by arrival: one that had to give way is where it was before."""

    def __init__(self) -> None:
        self._reqs: list[Req] = []

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs)

    def add(self, req: Req) -> None:
        bisect.insort(self._reqs, req, key=lambda other: other.precedence)

    def last_refusable(self) -> Req:
        """Who has to go where one is too many: the last of those that were never admitted."""
        return next(req for req in reversed(self._reqs) if not req.was_admitted)

    def remove(self, req: Req) -> None:
        self._reqs.remove(req)
