"""Level 2: what an engine does before it serves and between requests, each in a trace of its own."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing.context import leave
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.record.recorder import Recorder
from sgl_aspects.tracing.records import SpanType, error_type
from sgl_aspects.tracing.schema import PREPARATIONS


class PreparationObserver:
    """Spans ``load_model``, ``init_kv_cache``, ``capture_graphs`` and ``update_weights``."""

    def __init__(self, trackers: Trackers) -> None:
        self._preparations = {
            role: _Preparation(trackers.recorder, type)
            for role, type in PREPARATIONS.items()
            if role in trackers.engine.roles
        }

    def observations(self) -> list[Observation]:
        return [Observation(role, one.enter, one.exit, 2) for role, one in self._preparations.items()]


class _Preparation:
    def __init__(self, recorder: Recorder, type: SpanType) -> None:
        self._recorder = recorder
        self._type = type
        self._write = recorder.spans(type)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._recorder.level < 2:
            return None
        span_id, start_ns = self._recorder.new_id(), monotonic_ns()
        # Announced: it may take minutes, and the process may die of it.
        self._recorder.announce(self._type, span_id, span_id, 0, start_ns)
        return span_id, start_ns, self._recorder.enter(self._type, span_id, span_id, 0, start_ns)

    def exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is not None:
            span_id, start_ns, opened = token
            leave(opened)
            self._write(span_id, span_id, 0, start_ns, monotonic_ns(), (), error_type(error))
