"""The life of a batch: scheduled, launched, its forward run, sampled, its result processed.

A step is one record (:mod:`..ring.steps`). The tracker opens it when the batch is launched and ends it when
its result has been processed, possibly after the next batch was launched. In between, observers store its
moments straight into ``step.words``, one store each: a step of a fast engine lasts two milliseconds, and a
call for each moment would cost more than the moment.

Nothing is told to OpenTelemetry, and no context variable is set: the current span is
:meth:`StepTracker.current_span`, in the thread that runs the step.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from time import time_ns
from typing import Any

from sgl_aspects.tracing import schema
from sgl_aspects.tracing.context import Fields
from sgl_aspects.tracing.recorder import Recorder, SpanWriter, in_sample
from sgl_aspects.tracing.ring import format as layout
from sgl_aspects.tracing.ring.format import (
    CHILD_RUN_BATCH,
    KIND_STEP,
    PROCESS_END,
    SAMPLE_ALL,
    WORD_LEVEL,
    WORD_SAMPLE,
)
from sgl_aspects.tracing.ring.steps import CHILD_STARTS, CHILD_TYPES, OpenSteps

pack_begin, pack_queues = layout.STEP_BEGIN.pack_into, layout.STEP_QUEUES.pack_into
# More batches than these are not under way at once: the result of the oldest will never be processed.
_MOST_IN_FLIGHT = layout.OPEN_STEPS - 2
# Details of what precedes a step are bounded: they may be outside of any step.
_MOST_DETAILS = 1000


class Step:
    """A batch from its launch to its result. ``id`` 0: not traced, but figures for the metrics.

    ``words[block + …]`` are its moments and figures (:mod:`..ring.format`), at ``offset`` in the memory.
    ``child``: the span of it that is open now, 0: its own. ``number``: the engine's. ``batch``, ``result``:
    how the result's processing finds it. ``prefill``: what its observer keeps of the prompts in it;
    ``events``: the device's. Objects are used again: a decode step makes none.
    """

    __slots__ = (
        "batch",
        "block",
        "child",
        "events",
        "id",
        "is_announced",
        "is_recorded",
        "number",
        "offset",
        "opened",
        "prefill",
        "result",
        "spans",
        "steps",
        "words",
    )

    def __init__(self, steps: OpenSteps, block: int) -> None:
        self.steps, self.words, self.block, self.offset = steps, steps.words, block, block * 8
        self.id = self.child = 0
        self.number: int | None = None
        self.batch: Any = None
        self.result: Any = None
        self.prefill: Any = None
        self.events: Any = None
        self.is_announced = False
        self.is_recorded = True
        self.opened: tuple[int, Fields] | None = None
        self.spans: dict[int, Fields] = {}


def store_queues(
    memory: Any,
    offset: int,
    number: int | None,
    waiting: int | None,
    running: int | None,
    usage: float | None,
) -> None:
    """Stores what is known at a step's end: its number, and the figures of its scheduler."""
    pack_queues(
        memory,
        offset + 8 * layout.STEP_NUMBER,
        0 if number is None else number + 1,
        0 if waiting is None else waiting + 1,
        0 if running is None else running + 1,
        0 if usage is None else int(usage * layout.KV_USAGE_UNIT) + 1,
    )


class StepTracker:
    """The steps of one scheduler, which runs in one thread.

    ``schedule_start``, ``schedule_end``: of the latest scheduling, stored by its observer. ``running``: the
    step whose batch is being launched or processed now. ``on_level`` is called once a step where the
    recorder's level has changed, before anything of that step.
    """

    def __init__(self, recorder: Recorder, measures: bool = False) -> None:
        self.schedule_start = self.schedule_end = 0
        self.running: Step | None = None
        self.level = recorder.level
        self.on_level: Callable[[int], None] | None = None
        self.details: list[tuple[SpanWriter, int, int, str]] = []
        self.in_flight: list[Step] = []
        self._late: list[Step] = []
        self._recorder = recorder
        self._new_id = recorder.new_id
        self._measures = measures
        self._thread = 0
        self._steps: OpenSteps | None = None
        self._mode, self._mode_text = "", 0
        self._spare: list[Step] = []
        self._group, self._keys = 0, array("Q")
        self._spare_events: list[Any] = []
        self._nowhere = OpenSteps.in_memory()

    def begin(
        self, now: int, batch: Any, mode: str, size: int, tokens: int, shared_id: int = 0
    ) -> Step | None:
        """A batch is launched; None where its step is not to be recorded.

        ``shared_id``: the step's id where other processes derive the same one from the batch.
        """
        steps = self._recorder.steps
        if steps is not self._steps:
            steps = self._meet(steps)
        words = steps.words
        level = words[WORD_LEVEL]
        if level != self.level:
            self.level = level
            if self.on_level is not None:
                self.on_level(level)
        step_id = 0
        if level >= 2:
            step_id = shared_id or self._new_id()
            sample = words[WORD_SAMPLE]
            if sample < SAMPLE_ALL and not in_sample(step_id, sample):
                step_id = 0
        if not step_id and not (self._measures and level):
            return None
        spare = self._spare
        try:
            step = spare.pop() if spare else Step(steps, steps.take())
        except IndexError:
            return None
        if mode is not self._mode:
            self._mode, self._mode_text = mode, self._recorder.text(mode)
        start = self.schedule_start
        self.schedule_start = 0
        pack_begin(
            steps.memory,
            step.offset,
            KIND_STEP,
            step_id,
            self._group,
            start,
            self.schedule_end if start else 0,
            now,
            self._mode_text,
            size + 1,
            tokens + 1,
        )
        step.id, step.batch, step.child = step_id, batch, CHILD_RUN_BATCH
        self.running = step
        if self.details:
            self._write_details(step, start)
        return step

    def begin_unrecorded(self, batch: Any) -> Step:
        """For a batch whose step is not recorded, and whose result somebody waits for."""
        step = self.running = Step(self._nowhere, layout.OPEN_STEPS_WORD)
        step.batch, step.is_recorded = batch, False
        return step

    def link(self, keys: Sequence[int]) -> None:
        """From the next step on these requests are in the batch; called when they are others."""
        known = array("Q", keys)
        if known == self._keys:
            return
        group = self._new_id() if keys else 0
        if group and not self._recorder.write_group(group, keys):
            group, known = 0, array("Q")
        self._group, self._keys = group, known

    def launched(self, step: Step, result: Any) -> None:
        """The batch is on its way; its result is processed by and by."""
        self.running = None
        step.result = result
        in_flight = self.in_flight
        in_flight.append(step)
        if len(in_flight) > _MOST_IN_FLIGHT:
            lost = in_flight.pop(0)
            lost.words[lost.block] = 0
            self._give_back(lost)

    def take(self, batch: Any, result: Any) -> Step | None:
        """The step of a result: found by it, or by the batch where a pipeline made another result of it."""
        in_flight = self.in_flight
        if in_flight and in_flight[0].result is result:
            return in_flight.pop(0)
        for number, step in enumerate(in_flight):
            if step.result is result:
                return in_flight.pop(number)
        for number, step in enumerate(in_flight):
            if step.batch is batch:
                return in_flight.pop(number)
        return None

    def fail(self, step: Step, children: int, problem: str) -> None:
        """An exception has left what runs. ``children``: the bits of the spans that it went through."""
        words, block = step.words, step.block
        words[block + layout.STEP_ERROR] = self._recorder.text(problem)
        words[block + layout.STEP_FAILED] |= children

    def end(self, step: Step, now: int) -> None:
        """The result is processed, or there will be none."""
        self.running = None
        if not step.is_recorded:
            return
        step.words[step.block + PROCESS_END] = now
        if self._late:
            self._write_late()
        events = step.events
        if events is not None and not self._read_events(step, events):
            self._late.append(step)
            if len(self._late) > 2:
                self._write(self._late.pop(0))
            return
        self._write(step)

    def _write(self, step: Step) -> None:
        """The step becomes a record, and its object free."""
        self._recorder.end_step(step.steps, step.block)
        self._give_back(step)

    def _give_back(self, step: Step) -> None:
        step.batch = step.result = step.prefill = step.events = step.number = None
        if step.is_announced:
            step.is_announced, step.opened, step.spans = False, None, {}
        if step.steps is self._steps and step.is_recorded:
            self._spare.append(step)

    def idle(self, waiting: int | None, running: int | None, usage: float | None) -> None:
        """Nothing is left to run: the metrics are to show it."""
        steps = self._recorder.steps
        try:
            block = steps.take()
        except IndexError:
            return
        now = time_ns()
        pack_begin(steps.memory, block * 8, KIND_STEP, 0, 0, now, 0, 0, 0, 1, 0)
        store_queues(steps.memory, block * 8, None, waiting, running, usage)
        steps.words[block + PROCESS_END] = now
        self._recorder.end_step(steps, block)
        steps.give_back(block)

    # -- the device's time ----------------------------------------------------------------------------------

    def take_events(self, platform: Any) -> Any:
        """A pair of the platform's events, used before where there is one."""
        spare = self._spare_events
        return spare.pop() if spare else (platform.create_event(), platform.create_event())

    def give_back_events(self, events: Any) -> None:
        self._spare_events.append(events)

    def _read_events(self, step: Step, events: Any) -> bool:
        begin, end = events
        try:
            milliseconds = begin.elapsed_ms(end)  # to ask first whether it is there takes as long again
        except RuntimeError:  # the device has not come so far
            return False
        step.words[step.block + layout.STEP_DEVICE_TIME] = max(0, int(milliseconds * 1e6)) + 1
        step.events = None
        self._spare_events.append(events)
        return True

    def _write_late(self) -> None:
        late, self._late = self._late, []
        for step in late:
            if self._read_events(step, step.events):
                self._write(step)
            else:
                self._late.append(step)

    def flush(self) -> None:
        """Records the steps that still wait for the device, without its time: nobody will ask again."""
        self._write_late()
        while self._late:
            self._write(self._late.pop(0))

    # -- what is below a step -------------------------------------------------------------------------------

    def current_span(self) -> Fields | None:
        """The span that is open in this thread, if it is one of a step's. The step is announced."""
        step = self.running
        if step is None or not step.id or threading.get_ident() != self._thread:
            return None
        opened = step.opened
        if opened is None or opened[0] != step.child:
            opened = step.opened = step.child, self._open(step, step.child)
        return opened[1]

    def parent_of_detail(self) -> tuple[int, int]:
        """The step that runs and the span of it that is open; zeros outside of a step."""
        step = self.running
        if step is None or not step.id:
            return 0, 0
        if not step.is_announced:
            self._announce(step)
        return step.id, layout.child_id(step.id, step.child)

    def _open(self, step: Step, child: int) -> Fields:
        """What says that a child is open, inside of what says it of its parent."""
        self._announce(step)
        if child not in step.spans:
            parent = layout.CHILD_RUN_BATCH if child in (layout.CHILD_FORWARD, layout.CHILD_SAMPLE) else 0
            outer = self._open(step, parent) if child else None
            start = step.words[step.block + (CHILD_STARTS[child] if child else layout.RUN_START)]
            ids = layout.child_id(step.id, child), step.id, layout.child_id(step.id, parent) if child else 0
            span = self._recorder.open_span(CHILD_TYPES[child] if child else schema.STEP, *ids, start)
            step.spans[child] = step.id, ids[0], None, span, outer
        return step.spans[child]

    def _announce(self, step: Step) -> None:
        """Records that the step has begun, for what is recorded below it."""
        if not step.is_announced:
            step.is_announced = True
            words, block = step.words, step.block
            start = words[block + layout.SCHEDULE_START] or words[block + layout.RUN_START]
            self._recorder.announce(schema.STEP, step.id, step.id, 0, start)

    def keep_detail(self, write: SpanWriter, start_ns: int, end_ns: int, problem: str) -> None:
        """What is done before it is known whether there will be a step."""
        if len(self.details) < _MOST_DETAILS:
            self.details.append((write, start_ns, end_ns, problem))

    def _write_details(self, step: Step, schedule_start: int) -> None:
        details, self.details = self.details, []
        if not step.id:
            return
        self._announce(step)
        schedule_id = layout.child_id(step.id, layout.CHILD_SCHEDULE)
        for write, start_ns, end_ns, problem in details:
            parent_id = schedule_id if schedule_start and start_ns >= schedule_start else step.id
            write(self._new_id(), step.id, parent_id, start_ns, end_ns, (), problem)

    def _meet(self, steps: OpenSteps) -> OpenSteps:
        """The recorder has another file: at the beginning, after a fork, at the end."""
        if self._recorder.level:
            self._recorder.open()
            steps = self._recorder.steps
        self._steps = steps
        self._thread = threading.get_ident()
        self._new_id = self._recorder.new_id
        self._mode = ""
        self._spare.clear()
        keys, self._group, self._keys = self._keys, 0, array("Q")
        self.link(keys)
        return steps
