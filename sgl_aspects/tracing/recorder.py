"""The one interface through which aspects record; :mod:`.ring.recorder` and :mod:`.sdk` stand behind it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sgl_aspects.tracing.context import Opened, TraceContext
from sgl_aspects.tracing.records import AttributeValue, Event, SpanEnd, SpanType

if TYPE_CHECKING:
    from sgl_aspects.tracing.ring.open_steps import OpenSteps


class SpanWriter(Protocol):
    """Records one whole span of a type; its arguments are the fields of :class:`~.records.SpanEnd`."""

    def __call__(
        self,
        span_id: int,
        root_id: int,
        parent_id: int,
        start_ns: int,
        end_ns: int,
        values: Sequence[AttributeValue] = (),
        error: str = "",
        links: Sequence[int] = (),
    ) -> None: ...


class Recorder(Protocol):
    """Writes the records of one process (see :mod:`.records` for their meaning). Never raises, never waits.

    Safe in several threads; after a fork the child writes records of its own.
    """

    @property
    def level(self) -> int:
        """How much is to be recorded now, 0 is nothing. Asked with each request and each step."""

    @property
    def sample(self) -> int:
        """Sampled share of steps, and of requests that no caller decided about, times 2**32."""

    def new_id(self) -> int:
        """A span id or key that nobody else in the run has."""

    def spans(self, type: SpanType) -> SpanWriter:
        """What records the spans of this type; to be asked for once."""

    def write(self, event: Event) -> None:
        """Records what is told of a request."""

    def announce(self, type: SpanType, span_id: int, root_id: int, parent_id: int, start_ns: int) -> None:
        """Records that a span has begun: of roots and long spans, so that unfinished ones can be shown."""

    def enter(
        self,
        type: SpanType,
        span_id: int,
        root_id: int,
        parent_id: int,
        start_ns: int,
        trace: TraceContext | None = None,
    ) -> Opened:
        """A span that this process will record is current, until ``context.leave`` of what this gives.

        ``trace``: that of the root, for what belongs to a request.
        """

    def open(self) -> bool:
        """Makes this process a writer of the run, if it is not; False where the run has ended."""

    def open_span(self, type: SpanType, span_id: int, root_id: int, parent_id: int, start_ns: int) -> Any:
        """OpenTelemetry's object for a span that is open; None where a span is recorded when it ends."""

    @property
    def steps(self) -> OpenSteps:
        """Where steps are open; its words hold the level and the sampling, too. May change at any time."""

    def text(self, text: str) -> int:
        """The number of a text, for a step's words; 0 where there is no room for it."""

    def write_group(self, key: int, links: Sequence[int]) -> bool:
        """Records which requests a step links to (their keys); False where there was no room."""

    def end_step(self, steps: OpenSteps, block: int) -> None:
        """Records the step in a block of ``steps``, which is no longer open."""

    def close(self) -> None:
        """Ends this process's part of the run; what is recorded later is lost."""


def span_writer(type: SpanType, take: Callable[[SpanEnd], None]) -> SpanWriter:
    """A writer that hands each span on as one record."""

    def write(*fields: Any, **named: Any) -> None:
        take(SpanEnd(type, *fields, **named))

    return write


def in_sample(root_id: int, sample: int) -> bool:
    """Whether a root is among the ``sample`` in 2**32 that are wanted."""
    # Ids follow one another: their product with an odd number is spread evenly.
    return (root_id * 0x9E37_79B9 & 0xFFFF_FFFF) < sample


def id_source() -> Callable[[], int]:
    """Ids for one process, never 0: from a random number on, one after the other.

    They stay below 2**60: the bits above distinguish the spans of a step (:mod:`.ring.format`). That two of a
    hundred processes with a billion ids each meet is less likely than one in 50,000.
    """
    return itertools.count(1 + (int.from_bytes(os.urandom(8), "big") >> 5)).__next__
