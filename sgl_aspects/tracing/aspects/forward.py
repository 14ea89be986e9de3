"""Level 3: the model's forward pass, with the time that the device itself took for it."""

from __future__ import annotations

import collections
from time import time_ns
from typing import Any

from sgl_aspects.engines.base import Engine
from sgl_aspects.tracing.aspects.observer import Observation, error_type, nothing
from sgl_aspects.tracing.aspects.scheduled import SchedulerState
from sgl_aspects.tracing.context import close_span
from sgl_aspects.tracing.recorder import Recorder
from sgl_aspects.tracing.records import SpanType

FORWARD = SpanType(
    "forward",
    {
        "sgl_aspects.forward.mode": str,
        "sgl_aspects.batch.size": int,
        "sgl_aspects.batch.tokens": int,
        "sgl_aspects.device.name": str,
        "sgl_aspects.forward.device_time": float,
        "sgl_aspects.forward.graph": str,
    },
)
# So many forward passes may wait for the device; beyond, the oldest is recorded without its device time.
_PENDING = 64
_DEVICE_TIME = 4  # the place of its value


class ForwardAspect:
    """Spans ``forward``. The device's events are read with a batch's result or later, never waited for."""

    def __init__(self, recorder: Recorder, engine: Engine, state: SchedulerState) -> None:
        self._recorder = recorder
        self._write = recorder.spans(FORWARD)
        self._state = state
        #: What is to be written, and the events that the device has yet to reach.
        self._pending: collections.deque[tuple[tuple[Any, ...], tuple[Any, ...]]] = collections.deque()
        self._spare: list[tuple[Any, ...]] = []
        self._at_hand: tuple[Any, ...] | None = None  # the events of the pass that runs
        self._has_begun = False  # on the device
        #: Whether the last pass asked for a graph. An event costs the device as much as a small kernel: where
        #: the answer or the launch says when its work begins, entering does not.
        self._asks_for_graph = False
        self._has_events = True
        self._device_name: str | None = None
        # How the forward pass at hand runs; None where the engine has no role for graphs.
        self._eager = "eager" if "graph_replay" in engine.roles else None
        self._graph = self._eager
        reader = engine.reader
        self._runner = engine.call_reader("forward", "model_runner")
        self._batch = engine.call_reader("forward", "batch")
        self._platform = reader("model_runner.platform")
        self._graph_runner = reader("model_runner.graph_runner")
        self._batch_values = engine.values_reader("batch", ("mode", "batch_size", "num_tokens"))

    def observations(self) -> list[Observation]:
        return [
            Observation("forward", self._enter, self._exit),
            Observation("process_batch_result", _nothing_enter, self._process_exit),
            Observation("graph_decision", _nothing_enter, self._decision_exit),
            Observation("graph_replay", self._replay_enter, nothing),
            Observation("graph_launch", self._launch_enter, nothing),
        ]

    def flush(self) -> None:
        """Records what still waits for the device, without its time there: nobody will ask again."""
        self._read_events()
        while self._pending:
            self._write(*self._pending.popleft()[0])

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self._state
        if state.level < 3 or not state.step_id:
            self._at_hand = None
            return None  # not asked for, or a warm-up outside any step
        self._graph = self._eager
        batch = self._batch(args, kwargs)
        runner = self._runner(args, kwargs)
        platform = self._platform(runner)
        if self._device_name is None and platform is not None:
            self._device_name = getattr(platform, "device_name", None)
        events = self._at_hand = self._events(platform)
        start_ns = time_ns()
        self._has_begun = False
        if not self._asks_for_graph or self._graph_runner(runner) is None:
            self._begin_on_device()
        self._asks_for_graph = False
        span_id, parent_id = self._recorder.new_id(), state.run_id or state.step_id
        opened = self._recorder.begin(FORWARD, span_id, state.step_id, parent_id, start_ns)
        return start_ns, batch, events, span_id, parent_id, opened

    def _exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return
        start_ns, batch, events, span_id, parent_id, opened = token
        state = self._state
        if events is not None:
            self._at_hand = None
            if self._has_begun:
                events[1].record()
            else:  # it did not ask for a graph, unlike the last one
                self._spare.append(events)
                events = None
        end_ns = time_ns()
        close_span(opened)
        values = [*self._batch_values(batch), self._device_name, None, self._graph]
        problem = "" if error is None else error_type(error)
        span = (span_id, state.step_id, parent_id, start_ns, end_ns, values, problem)
        if events is None:
            self._write(*span)
        else:
            self._pending.append((span, events))
            self._read_events()

    def _replay_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._graph = "replayed"

    def _decision_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if self._at_hand is not None:
            self._asks_for_graph = True
            if not result:
                self._begin_on_device()

    def _launch_enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # While the host prepared the replay the device had nothing to do.
        self._begin_on_device()

    def _begin_on_device(self) -> None:
        if self._at_hand is not None:
            self._at_hand[0].record()
            self._has_begun = True

    def _process_exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if self._pending:  # of a batch whose result is here the device has done all
            self._read_events()

    def _events(self, platform: Any) -> tuple[Any, ...] | None:
        """A pair of events of the platform; None where it has none, or a graph is being captured."""
        if platform is None or not self._has_events or platform.is_capturing():
            return None
        if self._spare:
            return self._spare.pop()
        try:
            return platform.create_event(), platform.create_event()
        except NotImplementedError:
            self._has_events = False
            return None

    def _read_events(self) -> None:
        pending = self._pending
        while pending:
            span, events = pending[0]
            begin, end = events
            is_done = end.query()
            if not is_done and len(pending) <= _PENDING:
                return
            pending.popleft()
            if is_done:
                span[5][_DEVICE_TIME] = begin.elapsed_ms(end) / 1e3
                self._spare.append(events)
            self._write(*span)


def _nothing_enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The work is at the end."""
