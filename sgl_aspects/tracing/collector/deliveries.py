"""How far the spans of the rings are delivered: what a later collector need not read again."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sgl_aspects.tracing.export.span_exporters import Pipeline


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
        while self._passes and self._is_done(self._passes[0]):
            self.positions = self._passes.popleft().positions

    def _is_done(self, one: _Pass) -> bool:
        return all(pipeline.done >= given for pipeline, given in zip(self._pipelines, one.given))
