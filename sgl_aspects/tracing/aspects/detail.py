"""Level 4: what the scheduler and the layers do within a step, call by call."""

from __future__ import annotations

from time import time_ns
from typing import Any

from sgl_aspects.engines.base import Engine
from sgl_aspects.tracing.aspects.observer import Observation, error_type
from sgl_aspects.tracing.aspects.scheduled import SchedulerState
from sgl_aspects.tracing.recorder import Recorder
from sgl_aspects.tracing.records import SpanType

#: Roles that an engine may have, each with the name of its spans.
_SPANS = {
    "cache_match": "cache.match",
    "cache_insert": "cache.insert",
    "cache_evict": "cache.evict",
    "kv_alloc": "kv.alloc",
    "kv_alloc_prefill": "kv.alloc",
    "kv_alloc_decode": "kv.alloc",
    "kv_free": "kv.free",
    "attention": "attention",
    "operator": "operator",
    "logits": "logits",
    "sampler": "sampler",
}


class DetailAspect:
    """Spans below a step: of the prefix cache, the KV pool, attention, operators and the sampler.

    A graph that is replayed runs no Python: its layers leave no spans.
    """

    def __init__(self, recorder: Recorder, engine: Engine, state: SchedulerState) -> None:
        self._details = {
            role: _Detail(recorder, state, SpanType(name))
            for role, name in _SPANS.items()
            if role in engine.roles
        }

    def observations(self) -> list[Observation]:
        return [Observation(role, detail.enter, detail.exit) for role, detail in self._details.items()]


class _Detail:
    def __init__(self, recorder: Recorder, state: SchedulerState, type: SpanType) -> None:
        self._recorder = recorder
        self._state = state
        self._type = type
        self._write = recorder.spans(type)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, state = self._recorder, self._state
        if recorder.level < 4:
            return None
        span_id, parent_id, start_ns = recorder.new_id(), state.run_id or state.step_id, time_ns()
        opened = None
        if state.step_id:
            opened = recorder.begin(self._type, span_id, state.step_id, parent_id, start_ns)
        return start_ns, span_id, parent_id, opened

    def exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is None:
            return
        start_ns, span_id, parent_id, opened = token
        end_ns, state, problem = time_ns(), self._state, error_type(error)
        if opened is not None:
            self._write(span_id, state.step_id, parent_id, start_ns, end_ns, (), problem, (), opened)
        elif len(state.details) < _MOST_WAITING:
            state.details.append((self._write, start_ns, end_ns, problem))


# What is done before it is known whether there will be a step; bounded, for it may be done outside of any.
_MOST_WAITING = 1000
