"""The life of a batch: scheduled, launched, its forward run, sampled, its result processed.

A step is one record (:mod:`..ring.steps`). The tracker opens it when the batch is launched and ends it when
its result has been processed, possibly after the next batch was launched. In between, observers store its
moments straight into ``step.words``, one store each: a step of a fast engine lasts two milliseconds, and a
call for each moment would cost more than the moment.

Nothing is told to OpenTelemetry, and no context variable is set: whoever asks what is current is told by
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
from sgl_aspects.tracing.ring.steps import CHILD_STARTS, CHILD_TYPES, OpenSteps

# More batches than these are not under way at once: the result of the oldest will never be processed.
_MOST_IN_FLIGHT = layout.OPEN_STEPS - 2
# Details of what precedes a step are bounded: they may be outside of any step.
_MOST_DETAILS = 1000


class Step:
    """A batch from its launch to its result. ``id`` 0: not traced, but figures for the metrics.

    ``words[block + …]`` are its moments and figures (:mod:`..ring.format`). ``child``: the span of it that
    is open now, 0: its own. ``batch``, ``result``: how the result's processing finds it. ``prefill``: what
    its observer keeps of the prompts in it; ``events``: the device's.
    """

    __slots__ = (
        "batch",
        "block",
        "child",
        "events",
        "id",
        "is_announced",
        "is_recorded",
        "opened",
        "prefill",
        "result",
        "spans",
        "steps",
        "words",
    )

    def __init__(self, steps: OpenSteps, block: int, id: int, batch: Any) -> None:
        self.steps, self.words, self.block, self.id = steps, steps.words, block, id
        self.batch, self.result = batch, None
        self.child = 0
        self.prefill: Any = None
        self.events: Any = None
        self.is_announced = False
        self.is_recorded = True
        self.opened: tuple[int, Fields] | None = None
        self.spans: dict[int, Fields]


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
        self._texts: dict[str, int] = {}
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
        level = words[layout.WORD_LEVEL]
        if level != self.level:
            self.level = level
            if self.on_level is not None:
                self.on_level(level)
        step_id = 0
        if level >= 2:
            step_id = shared_id or self._new_id()
            sample = words[layout.WORD_SAMPLE]
            if sample < layout.SAMPLE_ALL and not in_sample(step_id, sample):
                step_id = 0
        if not step_id and not (self._measures and level):
            return None
        try:
            block = steps.take()
        except IndexError:
            return None
        text = self._texts.get(mode)
        if text is None:
            text = self._texts[mode] = self._recorder.text(mode)
        start = self.schedule_start
        self.schedule_start = 0
        layout.STEP_BEGIN.pack_into(
            steps.memory,
            block * 8,
            *(layout.KIND_STEP, step_id, self._group, start, self.schedule_end if start else 0, now),
            *(text, size + 1, tokens + 1),
        )
        step = self.running = Step(steps, block, step_id, batch)
        step.child = layout.CHILD_RUN_BATCH
        if self.details:
            self._write_details(step, start)
        return step

    def begin_unrecorded(self, batch: Any) -> Step:
        """For a batch whose step is not recorded, and whose result somebody waits for."""
        step = self.running = Step(self._nowhere, layout.OPEN_STEPS_WORD, 0, batch)
        step.is_recorded = False
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
            if lost.is_recorded:
                lost.words[lost.block] = 0
                lost.steps.give_back(lost.block)

    def take(self, batch: Any, result: Any) -> Step | None:
        """The step of a result: found by it, or by the batch where a pipeline made another result of it."""
        in_flight = self.in_flight
        for number, step in enumerate(in_flight):
            if step.result is result:
                del in_flight[number]
                return step
        for number, step in enumerate(in_flight):
            if step.batch is batch:
                del in_flight[number]
                return step
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
        step.words[step.block + layout.PROCESS_END] = now
        if self._late:
            self._write_late()
        events = step.events
        if events is not None and not self._read_events(step, events):
            self._late.append(step)
            if len(self._late) > 2:
                self._give_up_late()
            return
        self._recorder.end_step(step.steps, step.block)

    def idle(self, waiting: int | None, running: int | None, usage: float | None) -> None:
        """Nothing is left to run: the metrics are to show it."""
        steps = self._recorder.steps
        try:
            block = steps.take()
        except IndexError:
            return
        now, words = time_ns(), steps.words
        layout.STEP_BEGIN.pack_into(steps.memory, block * 8, *(layout.KIND_STEP, 0, 0, now, 0, 0), *(0, 1, 0))
        self.store_queues(words, block, None, waiting, running, usage)
        words[block + layout.PROCESS_END] = now
        self._recorder.end_step(steps, block)

    @staticmethod
    def store_queues(
        words: Any,
        block: int,
        number: int | None,
        waiting: int | None,
        running: int | None,
        usage: float | None,
    ) -> None:
        """The figures of a scheduler at a step's end."""
        words[block + layout.STEP_NUMBER] = 0 if number is None else number + 1
        words[block + layout.STEP_WAITING] = 0 if waiting is None else waiting + 1
        words[block + layout.STEP_RUNNING] = 0 if running is None else running + 1
        words[block + layout.STEP_KV_USAGE] = 0 if usage is None else int(usage * layout.KV_USAGE_UNIT) + 1

    # -- the device's time ----------------------------------------------------------------------------------

    def take_events(self, platform: Any) -> Any:
        """A pair of the platform's events, used before where there is one."""
        spare = self._spare_events
        return spare.pop() if spare else (platform.create_event(), platform.create_event())

    def give_back_events(self, events: Any) -> None:
        self._spare_events.append(events)

    def _read_events(self, step: Step, events: Any) -> bool:
        begin, end = events
        if not end.query():
            return False
        seconds = begin.elapsed_ms(end)
        step.words[step.block + layout.STEP_DEVICE_TIME] = max(0, int(seconds * 1e6)) + 1
        step.events = None
        self._spare_events.append(events)
        return True

    def _write_late(self) -> None:
        late, self._late = self._late, []
        for step in late:
            if step.events is None or self._read_events(step, step.events):
                self._recorder.end_step(step.steps, step.block)
            else:
                self._late.append(step)

    def _give_up_late(self) -> None:
        step = self._late.pop(0)
        self._recorder.end_step(step.steps, step.block)

    def flush(self) -> None:
        """Records the steps that still wait for the device, without its time: nobody will ask again."""
        self._write_late()
        while self._late:
            self._give_up_late()

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
            step.is_announced, step.spans = True, {}
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
        self._texts.clear()
        keys, self._group, self._keys = self._keys, 0, array("Q")
        self.link(keys)
        return steps
