"""Level 3, in a process that runs passes for a remote scheduler: spans are joined to the scheduler's step.

Both sides derive the step's id from the batch (``batch.shared_id``): nothing has to be sent, and the order
and host of attaching do not matter. Each rank writes its own spans.
"""

from __future__ import annotations

import collections
from time import monotonic_ns
from typing import Any

from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.recorder import in_sample
from sgl_aspects.tracing.records import error_type
from sgl_aspects.tracing.schema import FORWARD, SAMPLE

# Cap on passes that wait for the device: the oldest is recorded without its device time.
_MOST_WAITING = 64
_DEVICE_TIME = 4  # index of its value


class WorkerPasses:
    """Writes ``forward``, and at level 4 ``sample``, where steps run in another process.

    ``step_id``, ``span_id``: of the latest pass, 0 if it is not recorded; ``graph``: how that pass ran.
    """

    def __init__(self, trackers: Trackers) -> None:
        engine = trackers.engine
        self._recorder, self._tracker = trackers.recorder, trackers.steps
        self._write_forward = trackers.recorder.spans(FORWARD)
        self._write_sample = trackers.recorder.spans(SAMPLE)
        self._batch = engine.call_reader("forward", "batch")
        self._runner = engine.call_reader("forward", "model_runner")
        self._shared_id = engine.reader("batch.shared_id")
        self._values = engine.values_reader("batch", ("mode", "reqs", "num_tokens"))
        self._mode_name = engine.reader("mode.name")
        self._platform_of = engine.reader("model_runner.platform")
        self.step_id = self.span_id = 0
        self.graph: str | None = None
        self._has_events = True
        self._waiting: collections.deque[tuple[Any, Any]] = collections.deque()

    def flush(self) -> None:
        """Record the passes that still wait for the device, without its time: there is no later read."""
        self._read_events()
        while self._waiting:
            self._write_forward(*self._waiting.popleft()[0])

    def forward_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, tracker = self._recorder, self._tracker
        self.step_id, tracker.remote = 0, (0, 0)
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
        self.step_id, self.span_id, self.graph = step_id, recorder.new_id(), None
        tracker.remote = step_id, self.span_id
        platform = self._platform_of(self._runner(args, kwargs))
        events, stream = self._take_events(platform)
        start_ns = monotonic_ns()
        if events is not None:
            events[0](stream)
        return start_ns, step_id, batch, platform, events, stream

    def forward_exit(self, token: Any, error: BaseException | None) -> None:
        start_ns, step_id, batch, platform, events, stream = token
        if events is not None:
            events[1](stream)
        end_ns = monotonic_ns()
        mode, reqs, num_tokens = self._values(batch)
        name = getattr(platform, "device_name", None)
        values = [self._mode_name(mode), len(reqs), num_tokens, name, None, self.graph]
        run_id = layout.child_id(step_id, layout.CHILD_RUN_BATCH)
        self._tracker.remote = step_id, run_id
        span = (self.span_id, step_id, run_id, start_ns, end_ns, values, error_type(error))
        if events is None:
            self._write_forward(*span)
            return
        self._waiting.append((span, events))
        self._read_events()

    def sample_enter(self) -> Any:
        return (monotonic_ns(), self.step_id) if self._recorder.level >= 4 else None

    def sample_exit(self, token: Any, error: BaseException | None) -> None:
        start_ns, step_id = token
        run_id = layout.child_id(step_id, layout.CHILD_RUN_BATCH)
        span_id = self._recorder.new_id()
        self._write_sample(span_id, step_id, run_id, start_ns, monotonic_ns(), (), error_type(error))
        if self._waiting:
            self._read_events()

    def _take_events(self, platform: Any) -> tuple[Any, Any]:
        """Return two of the platform's events and the stream; None if it has none, or a graph is captured."""
        if platform is None or not self._has_events or platform.is_capturing():
            return None, None
        try:
            return self._tracker.take_events(platform), platform.current_stream()
        except NotImplementedError:
            self._has_events = False
            return None, None

    def _read_events(self) -> None:
        while self._waiting:
            span, events = self._waiting[0]
            nanoseconds = self._tracker.device_ns(events)
            if nanoseconds is None and len(self._waiting) <= _MOST_WAITING:
                return
            self._waiting.popleft()
            if nanoseconds is not None:
                span[5][_DEVICE_TIME] = nanoseconds / 1e9
            self._write_forward(*span)
