"""Python classes with the fields of the compiled module's types, used if it is absent."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from sgl_aspects.tracing.record import format as layout


class Blocks:
    """The memory in which steps are open."""

    __slots__ = ()

    def map(self, memory: Any) -> None:
        """Note that steps are open in this memory."""

    def retire(self) -> None:
        """Release the memory."""


class Slots:
    """The free slots: ``take()`` returns the next number, its memory, and the offset there.

    Taking is one step of iterators written in C, which other threads cannot interrupt. ``StopIteration``:
    none is free.
    """

    __slots__ = ("_numbers", "take")

    def __init__(self) -> None:
        self.hand_out(1, 0, b"", 0)

    def hand_out(self, first: int, last: int, memory: Any, offset: int) -> None:
        """Set the free numbers and the offset of the first."""
        numbers = range(first, last + 1)
        offsets = range(offset, offset + len(numbers) * layout.SLOT_BYTES, layout.SLOT_BYTES)
        self._numbers: Iterator[int] = iter(numbers)
        self.take: Callable[[], tuple[int, Any, int]] = zip(
            self._numbers, itertools.repeat(memory), offsets
        ).__next__

    def __length_hint__(self) -> int:
        return operator.length_hint(self._numbers)


class Step:
    """The fields of a batch from its launch to its result."""

    __slots__ = (
        *("batch", "block", "child", "events", "id", "is_announced", "is_recorded", "offset", "opened"),
        *("prefill", "result", "spans", "steps", "words"),
    )

    steps: Any
    words: Any
    batch: Any
    result: Any
    prefill: Any
    events: Any
    opened: Any
    spans: dict[int, Any]
    id: int
    block: int
    offset: int
    child: int
    is_announced: bool
    is_recorded: bool


class Tracker:
    """The fields of a tracker of steps."""

    steps: Any
    running: Any
    in_flight: list[Any]
    late: list[Any]
    details: list[Any]
    spare: list[Any]
    spare_events: list[Any]
    last_id: int
    schedule_start: int
    schedule_end: int
    level: int
    group: int
    mode_text: int
    untimed: int
    finishing: bool


class StepPath:
    """The fields of the observer of steps."""

    tracker: Any
    slots: Any
    requests: dict[str, Any]
    preempted: set[Any]
    busy: Any
    mode: Any
    reqs: Any
    mode_source: Any
    reqs_source: Any
    number_source: Any
    id_source: Any
    ran_at: int
    processing_at: int
    processed_at: int
    result_at: int
    size: int
    known: int
    read_ns: int
    waiting: int
    running: int
    usage: int
    decodes: bool
    measures: bool
    #: Implemented by the compiled module only.
    schedule_enter: Any
    schedule_exit: Any
    run_enter: Any
    run_exit: Any
    process_enter: Any
    process_exit: Any


class Mark:
    """An event that C code records: the result of :meth:`DeviceEvent.recorder` for ``owner``."""

    owner: Any
    function: int
    elapsed: int
    event: int


class ForwardPath:
    """The fields of the observer of forward passes."""

    tracker: Any
    step: Any
    events: Any
    stream: Any
    met_runner: Any
    met_steps: Any
    runner_at: int
    stream_handle: int
    eager_text: int
    replayed_text: int
    device_text: int
    passes: int
    expects: int
    replays: int
    has_begun: bool
    has_ended: bool
    has_parts: bool
    has_events: bool
    #: Implemented by the compiled module only.
    forward_enter: Any
    forward_exit: Any
    launch_enter: Any
    launch_exit: Any
