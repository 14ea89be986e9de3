"""Level 3, in a process that runs passes for a remote scheduler: spans are joined to the scheduler's step.

Both sides derive the step's id from the batch (``batch.shared_id``): nothing has to be sent, and the order
and host of attaching do not matter. Each rank writes its own spans.
"""

from __future__ import annotations

import collections
from time import monotonic_ns
from typing import Any

from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.device import TimedPasses
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.recorder import SpanWriter, in_sample
from sgl_aspects.tracing.records import error_type
from sgl_aspects.tracing.schema import FORWARD, SAMPLE

# Cap on passes that wait for the device: the oldest is recorded without its device time.
_MOST_WAITING = 64
_DEVICE_TIME = 4  # index of its value


class WorkerPasses(TimedPasses):
    """Writes ``forward``, and at level 4 ``sample``, where steps run in another process.

    ``span_id``: of the latest pass, whose step the tracker has as ``remote``; ``graph``: how that pass ran.
    """

    def __init__(self, trackers: Trackers) -> None:
        super().__init__(trackers)
        engine = trackers.engine
        self._write_forward = trackers.recorder.spans(FORWARD)
        self._write_sample = trackers.recorder.spans(SAMPLE)
        self._batch = engine.call_reader("forward", "batch")
        self._shared_id = engine.reader("batch.shared_id")
        self._values = engine.values_reader("batch", ("mode", "reqs", "num_tokens"))
        self._mode_name = engine.reader("mode.name")
        self.span_id = 0
        self._eager = "eager" if "graph_launch" in engine.roles else None
        self.graph: str | None = None
        self._waiting: collections.deque[tuple[Any, Any]] = collections.deque()

    def forward_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, tracker = self._recorder, self.tracker
        tracker.remote = 0, 0
        level = recorder.steps.words[layout.WORD_LEVEL]
        if level != tracker.level:
            level = tracker.follow_level(level)
        if level < 3:
            return None
        batch = self._batch(args, kwargs)
        step_id = self._shared_id(batch) or 0
        if not step_id:
            return None  # an empty batch: its details, such as loads, belong to the next one
        is_recorded = in_sample(step_id, recorder.sample)
        if tracker.details:
            tracker.write_details(step_id if is_recorded else 0)
        if not is_recorded:
            return None
        self.span_id, self.graph = recorder.new_id(), self._eager
        tracker.remote = step_id, self.span_id
        runner = self._runner(args, kwargs)
        if runner is not self.met_runner:
            self._meet_runner(runner)
        start_ns, self.events = monotonic_ns(), None
        if self.has_events and not self._platform.is_capturing():
            self._take_events()
            self._begin_on_device()
        return start_ns, step_id, batch, self.events

    def forward_exit(self, token: Any, error: BaseException | None) -> None:
        start_ns, step_id, batch, events = token
        if events is not None:
            events[1](self.stream)
        end_ns = monotonic_ns()
        mode, reqs, num_tokens = self._values(batch)
        values = [self._mode_name(mode), len(reqs), num_tokens, self.device_name, None, self.graph]
        run_id = layout.child_id(step_id, layout.CHILD_RUN_BATCH)
        self.tracker.remote = step_id, run_id
        span = (self.span_id, step_id, run_id, start_ns, end_ns, values, error_type(error))
        self._waiting.append((span, events))
        self.flush(_MOST_WAITING)

    def sample_enter(self) -> Any:
        return monotonic_ns() if self._recorder.level >= 4 else None

    def sample_exit(self, start_ns: int, error: BaseException | None) -> None:
        self.write(self._write_sample, start_ns, error)
        self.flush(_MOST_WAITING)

    def write(self, write: SpanWriter, start_ns: int, error: BaseException | None) -> None:
        """Write a span that ends now, beside the latest pass."""
        write(self._recorder.new_id(), *self.tracker.remote, start_ns, monotonic_ns(), (), error_type(error))

    def flush(self, most_waiting: int = 0) -> None:
        """Record the passes whose device time is known, and the oldest beyond this number without it."""
        while self._waiting:
            span, events = self._waiting[0]
            nanoseconds = None if events is None else self.tracker.device_ns(events)
            if nanoseconds is None and events is not None and len(self._waiting) <= most_waiting:
                return
            self._waiting.popleft()
            if nanoseconds is not None:
                span[5][_DEVICE_TIME] = nanoseconds / 1e9
            self._write_forward(*span)
