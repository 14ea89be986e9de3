"""The life of a batch: scheduled, launched, its forward run, sampled, its result processed.

A step is one record (:mod:`..record.steps`). The tracker opens it when the batch is launched and ends it when
its result has been processed, possibly after the next batch was launched. In between, observers store
timestamps straight into ``step.words``: a step of a fast engine lasts two milliseconds, and a call per
timestamp would cost too much.

OpenTelemetry is not called, and no context variable is set: the current span is
:meth:`StepTracker.current_span`, in the thread that runs the step.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any

from sgl_aspects.run.control import LEVEL_MASK
from sgl_aspects.tracing import schema
from sgl_aspects.tracing.context import Fields
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.record.open_steps import OpenSteps
from sgl_aspects.tracing.record.recorder import Recorder, SpanWriter, first_id, in_sample
from sgl_aspects.tracing.record.steps import CHILD_STARTS, CHILD_TYPES
from sgl_aspects.tracing.records import AttributeValue

# Cap on spans of details that precede a step, since there may be no step.
_MOST_DETAILS = 1000


_IN_RUN_BATCH = (layout.CHILD_FORWARD, layout.CHILD_SAMPLE, layout.CHILD_DRAFT, layout.CHILD_DRAFT_EXTEND)


class Step(native.Step):
    """A batch from its launch to its result. ``id`` 0: untraced, with figures for the metrics only.

    ``words[block + …]`` are its timestamps and figures (:mod:`..record.format`).
    ``child``: its open child span, 0: none. ``batch``, ``result``: keys for the processing of the result.
    ``prefill``: the observer's chunks of prompts; ``events``: the device's. ``drafts``: by request id where
    the compiled path counts them, before the result is processed; ``verified``: the result, for those that it
    shows then. Objects are reused: a decode step
    allocates none.
    """

    batch: Any
    result: Any
    prefill: Any
    events: Any
    spans: dict[int, Fields]
    drafts: dict[Any, Any] | None
    verified: Any

    def __init__(self, steps: OpenSteps, block: int) -> None:
        self.steps, self.words, self.block = steps, steps.words, block
        self.id = self.child = 0
        self.batch = self.result = self.prefill = self.events = None
        self.drafts = self.verified = None
        self.is_announced, self.is_recorded = False, True
        self.spans = {}

    def store(self, values: dict[int, int]) -> None:
        """Begin the step's record: these words, and 0 in the others."""
        words, block = self.words, self.block
        words[block] = 0  # free while it changes
        for word in range(1, layout.STEP_FIELDS):
            words[block + word] = values.get(word, 0)
        words[block] = layout.KIND_STEP

    def store_queues(self, waiting: int, running: int, usage: int) -> None:
        """Store the figures of the queues and of the KV cache, encoded."""
        first = self.block + layout.STEP_WAITING
        self.words[first], self.words[first + 1], self.words[first + 2] = waiting, running, usage


def figure(number: int | None) -> int:
    """Encode a number for storage: 0 means that there is no number."""
    return 0 if number is None else number + 1


def usage_figure(usage: float | None) -> int:
    """Encode a fraction of 1 for storage."""
    return 0 if usage is None else int(usage * layout.KV_USAGE_UNIT) + 1


def _mark(event: Any) -> Any:
    """Return the event's mark for C code; zeros if only Python can record the event."""
    mark: Any = native.Mark()
    mark.owner = event
    mark.function, mark.elapsed, mark.event = event.recorder() or (0, 0, 0)
    return mark


class StepTracker(native.Tracker):
    """The steps of one scheduler, which runs in one thread.

    ``schedule_start``, ``schedule_end``: of the latest scheduling, stored by its observer. ``running``: the
    step being launched or processed. ``finishing``: a request may have ended since the latest result.
    ``untimed``: the number of graph replays between two whose device time is read. ``has_passes``: the steps'
    forward passes run in this process, so that no other needs to derive their ids.
    ``remote``: where steps run in another process, the ids of the latest pass's step (0: it is not recorded)
    and of its open span.
    ``on_level`` is called once, with the level and ``has_passes``, before a step, when the recorder's level
    has changed; ``on_asked`` when a command asks for a profile.
    """

    steps: OpenSteps | None
    running: Step | None
    in_flight: list[Step]
    late: list[Step]
    details: list[tuple[SpanWriter, int, int, Sequence[AttributeValue], str, bool]]
    spare: list[Step]
    spare_events: list[Any]

    def __init__(self, recorder: Recorder, measures: bool = False) -> None:
        self.schedule_start = self.schedule_end = self.group = self.mode_text = self.untimed = 0
        self.running = self.steps = None
        self.remote = 0, 0
        self.level = recorder.level
        self.finishing = self.has_passes = False
        self.on_level: Callable[[int, bool], None] | None = None
        self.on_asked: Callable[[], None] | None = None
        self.in_flight, self.late, self.details, self.spare, self.spare_events = [], [], [], [], []
        self._recorder = recorder
        self.last_id = first_id()  # of steps: incrementing is faster than a call
        self._measures = measures
        self._thread = 0
        self._mode, self._keys = "", array("Q")
        self._nowhere = OpenSteps.in_memory()

    def begin(
        self, now: int, batch: Any, mode: str, size: int, tokens: int | None, shared_id: int = 0
    ) -> Step | None:
        """Open the step of a launched batch; None if it is not to be recorded.

        ``shared_id``: the step's id if other processes derive the same one from the batch.
        """
        steps = self._recorder.steps
        if steps is not self.steps:
            steps = self._meet(steps)
        words = steps.words
        level = words[layout.WORD_LEVEL]
        if level != self.level:
            level = self.follow_level(level)
        step_id = 0
        if level >= 2:
            self.last_id += 1
            step_id = shared_id or self.last_id
            sample = words[layout.WORD_SAMPLE]
            if sample < layout.SAMPLE_ALL and not in_sample(step_id, sample):
                step_id = 0
        if not step_id and not (self._measures and level):
            self.schedule_start = 0  # the schedule belongs to a batch now
            return None
        spare = self.spare
        try:
            step = spare.pop() if spare else Step(steps, steps.take())
        except IndexError:
            self.read_late()
            if not spare:
                return None
            step = spare.pop()
        if mode is not self._mode:
            self._mode, self.mode_text = mode, self._recorder.text(mode)
        start = self.schedule_start
        self.schedule_start = 0
        step.store(
            {
                layout.STEP_SPAN_ID: step_id,
                layout.STEP_GROUP: self.group,
                layout.SCHEDULE_START: start,
                layout.SCHEDULE_END: self.schedule_end if start else 0,
                layout.RUN_START: now,
                layout.STEP_MODE: self.mode_text,
                layout.STEP_SIZE: figure(size),
                layout.STEP_TOKENS: figure(tokens),
            }
        )
        step.id, step.batch, step.child = step_id, batch, layout.CHILD_RUN_BATCH
        step.drafts = step.verified = None
        self.running = step
        if self.details:
            if step_id:
                self._open(step, layout.CHILD_SCHEDULE if start else 0)
            self.write_details(step_id, start)
        return step

    def follow_level(self, word: int) -> int:
        """Weave and remove the hooks of levels, now that the recorder's word has changed; return the level.

        Above the level in the same word is whether a command asks something.
        """
        level = word & LEVEL_MASK
        if level != self.level:
            self.level = level
            if self.on_level is not None:
                self.on_level(level, self.has_passes)
        if word != level and self.on_asked is not None:
            self.on_asked()
        return level

    def weave_late(self) -> None:
        """Weave what waited for the engine's package: it may have come on the path after the weaving."""
        if self.on_level is not None:
            self.on_level(self.level, self.has_passes)

    def meet_pass(self) -> None:
        """Note that forward passes run in this process; below level 3 the next step removes their hook."""
        self.has_passes = True
        if self.level < 3:
            self.level = 0  # so that the next begin() calls on_level

    def begin_unrecorded(self, batch: Any) -> Step:
        """Return a placeholder for a batch whose step is not recorded but whose result is awaited."""
        step = self.running = Step(self._nowhere, layout.OPEN_STEPS_WORD)
        step.batch, step.is_recorded = batch, False
        return step

    def link(self, keys: Sequence[int]) -> None:
        """Set the requests of the following steps; called when they change."""
        known = array("Q", keys)
        if known == self._keys:
            return
        group = self._recorder.new_id() if keys else 0
        if group and not self._recorder.write_group(group, keys):
            group, known = 0, array("Q")
        self.group, self._keys = group, known

    def launched(self, step: Step, result: Any) -> None:
        """Note that the batch was launched; its result is processed later."""
        self.running = None
        step.result = result
        in_flight = self.in_flight
        in_flight.append(step)
        if len(in_flight) > layout.MOST_IN_FLIGHT:
            lost = in_flight.pop(0)
            lost.words[lost.block] = 0
            self._give_back(lost)

    def take(self, batch: Any, result: Any) -> Step | None:
        """Return the step of a result: by the result, or by the batch if a pipeline replaced the result."""
        in_flight = self.in_flight
        for number, step in enumerate(in_flight):
            if step.result is result:
                return in_flight.pop(number)
        for number, step in enumerate(in_flight):
            if step.batch is batch:
                return in_flight.pop(number)
        return None

    def fail(self, step: Step, children: int, problem: str) -> None:
        """Record an exception. ``children``: the bits of the spans that it left."""
        words, block = step.words, step.block
        words[block + layout.STEP_ERROR] = self._recorder.text(problem)
        words[block + layout.STEP_HEAD] |= children << layout.FAILED_SHIFT

    def end(self, step: Step, now: int) -> None:
        """End the step: its result is processed, or there will be none."""
        self.running = None
        if not step.is_recorded:
            return
        step.words[step.block + layout.PROCESS_END] = now
        if step.events is None:
            self._write(step)
            return
        step.batch = step.result = step.verified = None  # keep no object of the engine alive
        self.late.append(step)
        self.read_late()

    def read_late(self, most: int = layout.MOST_LATE) -> None:
        """Write the steps whose device time is known by now, and all but the last ``most`` - 1."""
        late, self.late = self.late, []
        for step in late:
            if self._read_events(step):
                self._write(step)
            else:
                self.late.append(step)
        while len(self.late) >= most:
            self._write(self.late.pop(0))

    def drafted(self, drafted: int, accepted: int, *, are_counted: bool) -> None:
        """Note tokens that were drafted for the step whose result is processed.

        ``are_counted``: they are among the step's tokens, which the model was fed.
        """
        step = self.running
        if step is not None:
            words, block = step.words, step.block
            if not are_counted and words[block + layout.STEP_TOKENS]:
                words[block + layout.STEP_TOKENS] += drafted
            words[block + layout.STEP_DRAFTED] = (words[block + layout.STEP_DRAFTED] or 1) + drafted
            words[block + layout.STEP_ACCEPTED] = (words[block + layout.STEP_ACCEPTED] or 1) + accepted

    def recheck_drafts(self) -> None:
        """Read the drafts of launched batches in Python: a request of theirs is about to leave."""
        for step in self.in_flight:
            step.drafts = None

    def _write(self, step: Step) -> None:
        """Write the step's record and free its object."""
        self._recorder.end_step(step.steps, step.block)
        self._give_back(step)

    def _give_back(self, step: Step) -> None:
        step.batch = step.result = step.prefill = step.events = step.drafts = step.verified = None
        if step.is_announced:
            step.is_announced, step.spans = False, {}
        if step.steps is self.steps and step.is_recorded:
            self.spare.append(step)

    def idle(self, waiting: int | None, running: int | None, usage: float | None) -> None:
        """Record an idle scheduler, for the metrics."""
        steps = self._recorder.steps
        try:
            step = Step(steps, steps.take())
        except IndexError:
            return
        now = monotonic_ns()
        step.store(
            {
                layout.SCHEDULE_START: now,
                layout.STEP_SIZE: figure(0),
                layout.PROCESS_END: now,
            }
        )
        step.store_queues(figure(waiting), figure(running), usage_figure(usage))
        self._recorder.end_step(steps, step.block)
        steps.give_back(step.block)

    # -- the device's time ----------------------------------------------------------------------------------

    def take_events(self, platform: Any) -> Any:
        """Return two functions that mark begin and end in a stream, one for the milliseconds, and both for C.

        Reuses a pair if one is free, otherwise makes new events of the platform.
        """
        if self.spare_events:
            return self.spare_events.pop()
        begin, end = platform.create_event(), platform.create_event()
        marks = [] if native.compiled is None else [*map(_mark, (begin, end))]
        return begin.marker(), end.marker(), begin.timer(end), *marks

    def device_ns(self, events: Any) -> int | None:
        """Return the time between two events, which are free again; None: the device has not reached them."""
        try:
            milliseconds = events[2]()  # querying the event first takes as long again
        except RuntimeError:
            return None
        self.spare_events.append(events)
        return max(0, int(milliseconds * 1e6))

    def _read_events(self, step: Step) -> bool:
        nanoseconds = self.device_ns(step.events)
        if nanoseconds is None:
            return False
        step.words[step.block + layout.STEP_DEVICE_TIME] = nanoseconds + 1
        self.untimed = layout.UNTIMED_REPLAYS if nanoseconds < layout.SHORT_REPLAY_NS else 0
        step.events = None
        return True

    def flush(self) -> None:
        """Record the steps that still wait for the device, without its time: there is no later read."""
        self.read_late(1)

    # -- spans below a step ---------------------------------------------------------------------------------

    def current_span(self) -> Fields | None:
        """Return the open span of the step running in this thread, if any. Announces the step."""
        step = self.running
        if step is None or not step.id or threading.get_ident() != self._thread:
            return None
        return self._open(step, step.child)

    def parent_of_detail(self) -> tuple[int, int]:
        """Return the running step and its open span; zeros outside a step."""
        step = self.running
        if step is None:
            return self.remote
        if not step.id:
            return 0, 0
        return self._open(step, step.child)[:2]

    def _open(self, step: Step, child: int) -> Fields:
        """Return the fields of a child's open span, with its parent's as the outer ones."""
        start = self._announce(step)
        if child not in step.spans:
            parent = layout.CHILD_RUN_BATCH if child in _IN_RUN_BATCH else 0
            outer = self._open(step, parent) if child else None
            start = step.words[step.block + CHILD_STARTS[child]] if child else start
            ids = layout.child_id(step.id, child), step.id, layout.child_id(step.id, parent) if child else 0
            span = self._recorder.open_span(CHILD_TYPES[child] if child else schema.STEP, *ids, start)
            step.spans[child] = step.id, ids[0], None, span, outer
        return step.spans[child]

    def _announce(self, step: Step) -> int:
        """Record that the step has begun, for the spans below it; return when."""
        words, block = step.words, step.block
        start: int = words[block + layout.SCHEDULE_START] or words[block + layout.RUN_START]
        if not step.is_announced:
            step.is_announced = True
            self._recorder.announce(schema.STEP, step.id, step.id, 0, start)
        return start

    def keep_detail(
        self,
        write: SpanWriter,
        start_ns: int,
        end_ns: int,
        values: Sequence[AttributeValue],
        problem: str,
        lasts: bool,
    ) -> None:
        """Keep a detail that precedes the step, if there will be one; ``lasts``: however long it takes."""
        if len(self.details) < _MOST_DETAILS:
            self.details.append((write, start_ns, end_ns, values, problem, lasts))

    def drop_details(self, before: float) -> None:
        """Drop the kept details that began before this time and do not last: there was no step for them."""
        self.details = [each for each in self.details if each[1] >= before or each[-1]]

    def write_details(self, step_id: int, schedule_start: int = 0) -> None:
        """Write the kept details below a step that has been announced; 0: it is not recorded."""
        details, self.details = self.details, []
        schedule_id = layout.child_id(step_id, layout.CHILD_SCHEDULE)
        for write, start_ns, end_ns, values, problem, _ in details if step_id else ():
            parent_id = schedule_id if schedule_start and start_ns >= schedule_start else step_id
            write(self._recorder.new_id(), step_id, parent_id, start_ns, end_ns, values, problem)

    def _meet(self, steps: OpenSteps) -> OpenSteps:
        """Switch to the recorder's current file: at the start, after a fork, at the end."""
        if self._recorder.level:
            self._recorder.open()
            steps = self._recorder.steps
        self.steps = steps
        self._thread = threading.get_ident()
        self.last_id = first_id()
        self._mode = ""
        self.spare.clear()
        keys, self.group, self._keys = self._keys, 0, array("Q")
        self.link(keys)
        return steps
