"""The interface through which aspects record, the base of :mod:`.ring_recorder` and :mod:`..sdk`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sgl_aspects.run.control import LEVEL_MASK
from sgl_aspects.tracing.context import Opened, TraceContext, enter
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.records import AttributeValue, Event, SpanType

if TYPE_CHECKING:
    from sgl_aspects.tracing.record.open_steps import OpenSteps


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
    """Writes the records of one process (see :mod:`..records` for their meaning). Never raises, never waits.

    Safe in several threads; after a fork the child writes records of its own.
    """

    #: The memory of open steps; its words hold the level and the sampling too. May change at any time.
    steps: OpenSteps
    #: Returns a span id or key that is unique in the run.
    new_id: Callable[[], int]

    @property
    def level(self) -> int:
        """The recording level, 0 (off) to 4: read with each request and step, for commands change it."""
        return self.steps.words[layout.WORD_LEVEL] & LEVEL_MASK  # type: ignore[no-any-return]

    @property
    def sample(self) -> int:
        """The sampled share of steps, and of requests without a caller's decision, times 2**32."""
        return self.steps.words[layout.WORD_SAMPLE]  # type: ignore[no-any-return]

    def spans(self, type: SpanType) -> SpanWriter:
        """Return the writer for spans of this type; called once per type."""

    def write(self, event: Event) -> None:
        """Write a record about a request."""

    def announce(self, type: SpanType, span_id: int, root_id: int, parent_id: int, start_ns: int) -> None:
        """Record that a span has begun: of roots and long spans, so that unfinished ones can be shown."""
        return

    def enter(
        self,
        type: SpanType,
        span_id: int,
        root_id: int,
        parent_id: int,
        start_ns: int,
        trace: TraceContext | None = None,
    ) -> Opened:
        """Make a span that this process will record current, until ``context.leave`` with the result.

        ``trace``: that of the root, for what belongs to a request.
        """
        ids = span_id, root_id, parent_id, start_ns
        return enter(type, *ids, trace, span=self.open_span(type, *ids))

    def open(self) -> bool:
        """Make this process a writer of the run, if it is not; False if the run has ended."""
        return True

    def open_span(self, type: SpanType, span_id: int, root_id: int, parent_id: int, start_ns: int) -> Any:
        """Return OpenTelemetry's object for an open span; None if spans are recorded at their end."""
        return None

    def text(self, text: str) -> int:
        """Return the number of a text for a step's words; 0 if there is no room for it."""

    def write_group(self, key: int, links: Sequence[int]) -> bool:
        """Record which requests a step links to (their keys); False if there was no room."""

    def end_step(self, steps: OpenSteps, block: int) -> None:
        """Record the step in a block of ``steps``, which is then free."""

    def close(self, *, detaches: bool = False) -> None:
        """End this process's part of the run; later records are lost.

        ``detaches``: the process goes on untraced, so its open spans have not failed.
        """
        self.steps.words[layout.WORD_LEVEL] = 0


def in_sample(root_id: int, sample: int) -> bool:
    """Return whether a root is among the ``sample`` in 2**32 that are recorded."""
    # Ids are consecutive: their product with an odd number is spread evenly.
    return (root_id * 0x9E37_79B9 & 0xFFFF_FFFF) < sample


def first_id() -> int:
    """Return a random number for the ids from there on."""
    return 1 + (int.from_bytes(os.urandom(8), "big") >> 5)


def id_source() -> Callable[[], int]:
    """Generate ids for one process, never 0: consecutive, from a random number on.

    They stay below 2**60: the bits above distinguish the spans of a step (:mod:`.format`). The
    probability that two of a hundred processes with a billion ids each collide is below one in 50,000.
    """
    return itertools.count(first_id()).__next__
