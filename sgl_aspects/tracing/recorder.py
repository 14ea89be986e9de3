"""The one interface through which aspects record; storages stand behind it (:mod:`.ring`)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.records import AttributeValue, SpanType

_64_BITS = 0xFFFF_FFFF_FFFF_FFFF
# Odd, so that multiplying by it permutes the 64-bit numbers: ids do not repeat within a process.
_ODD = 0x9E37_79B9_7F4A_7C15


class Recorder(Protocol):
    """Writes the records of one process (see :mod:`.records` for their meaning). Never raises, never waits.

    Safe in several threads; after a fork the child writes records of its own.
    """

    @property
    def level(self) -> int:
        """How much is to be recorded now, 0 is nothing. Asked with each request and each step."""

    @property
    def sample(self) -> int:
        """So many in 2**32 of the requests that no caller decided about, and of the steps, are wanted."""

    def new_id(self) -> int:
        """A span id or key that nobody else in the run has."""

    def request_begin(
        self,
        span_id: int,
        request_id: str,
        start_ns: int,
        context: TraceContext,
        name: str,
        attributes: Mapping[str, AttributeValue],
    ) -> None: ...

    def request_sent(self, span_id: int) -> None: ...

    def request_seen(self, key: int, request_id: str, time_ns: int) -> None: ...

    def span_begin(
        self, span_id: int, root_id: int, parent_id: int, type: SpanType, start_ns: int
    ) -> None: ...

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
    ) -> None: ...

    def make_current(self, root_id: int) -> object | None:
        """Makes a root that this process began OpenTelemetry's current span; for ``context.restore``."""

    def close(self) -> None:
        """Ends this process's part of the run; what is recorded later is lost."""


def id_source() -> Callable[[], int]:
    """Ids for one process: a counter times an odd constant, xor a random number. Never 0."""
    mask = int.from_bytes(os.urandom(8), "big")
    following = itertools.count(1).__next__

    def new_id() -> int:
        return (following() * _ODD & _64_BITS) ^ mask or new_id()

    return new_id
