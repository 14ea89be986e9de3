"""The device's time for a forward pass: two of its events around the work, read later without waiting."""

from __future__ import annotations

import logging
from typing import Any

from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.record.format import PASSES_PER_STREAM

logger = logging.getLogger(__name__)


class TimedPasses(native.ForwardPath):
    """Records a pass's begin and end on the device of the model runner that runs it.

    ``events``: of the running pass; ``has_begun``: the first of them is recorded. ``stream``: looking it up
    takes longer than recording an event in it.
    """

    def __init__(self, trackers: Trackers) -> None:
        self.tracker, self._recorder = trackers.steps, trackers.recorder
        self._runner = trackers.engine.call_reader("forward", "model_runner")
        self._platform_of = trackers.engine.reader("model_runner.platform")
        self.met_runner: Any = None
        self._platform: Any = None
        self.events: Any = None
        self.stream: Any = None
        self.device_name: str | None = None
        self.has_events = self.has_begun = self.has_ended = self.has_parts = False
        self.passes = self.stream_handle = 0

    def _meet_runner(self, runner: Any) -> None:
        self.met_runner = runner
        self.tracker.weave_late()
        self._platform = platform = self._platform_of(runner)
        self.device_name = getattr(platform, "device_name", None)
        if platform is not None:
            try:
                platform.create_event()
                self._take_stream()
            except NotImplementedError as error:
                logger.info("no device time in traces: %s", error)
                self._platform = None
        self.has_events = self._platform is not None

    def _take_events(self) -> None:
        self.events = self.tracker.take_events(self._platform)
        self.has_begun = self.has_ended = self.has_parts = False

    def _begin_on_device(self) -> None:
        self.passes += 1
        if not self.passes & PASSES_PER_STREAM:
            self._take_stream()
        self.events[0](self.stream)
        self.has_begun = True

    def _take_stream(self) -> None:
        self.stream = self._platform.current_stream()
        self.stream_handle = self._platform.stream_handle(self.stream)
