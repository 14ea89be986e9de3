"""A process: its description at its start, and at level 2 what it does before it serves and between requests.

Roles named ``describe…`` read the description as ``description``.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic_ns
from typing import Any

from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing.context import leave
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.record.recorder import Recorder
from sgl_aspects.tracing.records import SpanType, error_type
from sgl_aspects.tracing.schema import PREPARATIONS

_ROLES = ("describe_server", "describe_detokenizer", "describe_scheduler", "describe_worker")


class ProcessObserver:
    """Reports to the tracker of the process as an object of the engine is made, and once it is."""

    def __init__(self, trackers: Trackers) -> None:
        self._process = trackers.process
        self._readers = {role: trackers.engine.call_reader(role, "description") for role in _ROLES}

    def observations(self) -> Iterator[Observation]:
        for role, describe in self._readers.items():

            def enter(args: tuple[Any, ...], kwargs: dict[str, Any], describe: Any = describe) -> Any:
                self._process.describe(describe(args, kwargs))
                return describe, args, kwargs

            yield Observation(role, enter, self._leave)

    def _leave(self, token: Any, result: Any, error: BaseException | None) -> None:
        describe, args, kwargs = token
        if error is None:
            self._process.describe(describe(args, kwargs))


class PreparationObserver:
    """Spans ``load_model``, ``init_kv_cache``, ``capture_graphs``, ``update_weights``, each in its trace."""

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
