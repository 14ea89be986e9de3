"""The life of a request and of a batch, in any engine: trackers, the only writers of their spans."""

from __future__ import annotations

from typing import Any, NamedTuple

from sgl_aspects.engines.base import Engine
from sgl_aspects.tracing.context import OpenSpan, innermost
from sgl_aspects.tracing.lifecycle.calls import Call, CallTracker
from sgl_aspects.tracing.lifecycle.process import ProcessTracker
from sgl_aspects.tracing.lifecycle.requests import RequestTracker
from sgl_aspects.tracing.lifecycle.steps import Step, StepTracker
from sgl_aspects.tracing.options import TraceOptions
from sgl_aspects.tracing.record.recorder import Recorder


class Trackers(NamedTuple):
    """The trackers of one engine, from which its observers are made."""

    engine: Engine
    recorder: Recorder
    options: TraceOptions
    process: ProcessTracker
    calls: CallTracker
    requests: RequestTracker
    steps: StepTracker

    @classmethod
    def of(cls, engine: Engine, recorder: Recorder, options: TraceOptions) -> Trackers:
        requests = RequestTracker(recorder)
        process = ProcessTracker(recorder)
        calls = CallTracker(engine, recorder, options, process)
        requests.on_end = calls.end_here
        return cls(
            engine, recorder, options, process, calls, requests, StepTracker(recorder, options.measures)
        )

    def is_recording(self) -> bool:
        """Return whether requests are recorded now."""
        return self.recorder.level > 0

    def current_request(self) -> tuple[int, int, bool] | None:
        """Return trace id, span id and sampled flag of the request that the current span belongs to."""
        span = innermost()
        if span is None or span.trace is None:
            return None
        return span.trace_id, span.root_id, span.trace.sampled

    def span_of(self, rid: Any) -> OpenSpan | None:
        """The span of the request with this id, if it is open in this process."""
        is_id = isinstance(rid, (str, int))  # an engine's ids may be numbers
        if not is_id:
            return None
        call = self.calls.live.get(rid)
        if call is not None:
            return OpenSpan(call.span_id, call.span_id, call.origin, None, None)
        request = self.requests.requests.get(rid)
        return None if request is None else OpenSpan(request.key, request.key, None, None, None)


__all__ = ["Call", "CallTracker", "ProcessTracker", "RequestTracker", "Step", "StepTracker", "Trackers"]
