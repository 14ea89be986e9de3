"""Level 4: what the scheduler and the layers do within a step, call by call."""

from __future__ import annotations

from time import time_ns
from typing import Any

from sgl_aspects.engines.catalog import Catalog
from sgl_aspects.tracing.aspects.observer import Observation, error_type
from sgl_aspects.tracing.aspects.scheduled import SchedulerState
from sgl_aspects.tracing.recorder import Recorder, SpanWriter
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

    def __init__(self, recorder: Recorder, catalog: Catalog, state: SchedulerState) -> None:
        self._details = {
            role: _Detail(recorder, state, recorder.spans(SpanType(name)))
            for role, name in _SPANS.items()
            if role in catalog.roles
        }

    def observations(self) -> list[Observation]:
        return [Observation(role, detail.enter, detail.exit) for role, detail in self._details.items()]


class _Detail:
    def __init__(self, recorder: Recorder, state: SchedulerState, write: SpanWriter) -> None:
        self._recorder = recorder
        self._state = state
        self._write = write

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        return time_ns() if self._recorder.level >= 4 else 0

    def exit(self, start_ns: int, result: Any, error: BaseException | None) -> None:
        if not start_ns:
            return
        end_ns, state, problem = time_ns(), self._state, error_type(error)
        if state.step_id:
            parent_id = state.run_id or state.step_id
            self._write(self._recorder.new_id(), state.step_id, parent_id, start_ns, end_ns, (), problem)
        elif len(state.details) < _MOST_WAITING:
            state.details.append((self._write, start_ns, end_ns, problem))


# What is done before it is known whether there will be a step; bounded, for it may be done outside of any.
_MOST_WAITING = 1000
