"""A process: its description at its start, and at level 2 what it does before it serves and between requests.

Roles named ``describe…`` read the description as ``description``. What a process does is a trace of its own,
or below the one in which it happens, and linked to the requests under way in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic_ns
from typing import Any, TypeAlias

from sgl_aspects.engines.base import CallReader
from sgl_aspects.engines.contract import ROLES, Observation
from sgl_aspects.tracing.context import leave
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.records import error_type
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


_Open: TypeAlias = tuple[int, int, str, list[Any]]


class PreparationObserver:
    """Spans such as ``load_model``, ``capture_graphs``, ``load_adapter`` and ``pause``."""

    def __init__(self, trackers: Trackers) -> None:
        #: Trace, span, role and arguments of those that are open, the innermost last: they run in one thread.
        open_spans: list[_Open] = []
        self._preparations = {
            role: _Preparation(trackers, role, open_spans)
            for role in PREPARATIONS
            if role in trackers.engine.roles
        }

    def observations(self) -> list[Observation]:
        return [Observation(role, one.enter, one.exit, 2) for role, one in self._preparations.items()]


class _Preparation:
    def __init__(self, trackers: Trackers, role: str, open_spans: list[_Open]) -> None:
        self._recorder, self._requests = trackers.recorder, trackers.requests.requests
        self._calls = trackers.calls.live
        self._role, self._type, self._open = role, PREPARATIONS[role], open_spans
        readers = {argument: trackers.engine.call_reader(role, argument) for argument in ROLES[role]}
        self._applies: CallReader = readers.pop("applies", _always)
        self._readers = [*readers.values()]
        self._write = trackers.recorder.spans(self._type)

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._recorder.level < 2 or not self._applies(args, kwargs):
            return None
        values = [read(args, kwargs) for read in self._readers]
        if self._open and self._open[-1][2:] == (self._role, values):
            return None  # a method that overrides another calls it
        span_id, start_ns = self._recorder.new_id(), monotonic_ns()
        root_id, parent_id = self._open[-1][:2] if self._open else (span_id, 0)
        # Announced: it may take minutes, and the process may die of it.
        self._recorder.announce(self._type, span_id, root_id, parent_id, start_ns)
        self._open.append((root_id, span_id, self._role, values))
        opened = self._recorder.enter(self._type, span_id, root_id, parent_id, start_ns)
        links = [request.key for request in self._requests.values()]
        links = links or [*{call.span_id for call in self._calls.values()}]  # of its callers' process
        return span_id, root_id, parent_id, start_ns, opened, values, links

    def exit(self, token: Any, result: Any, error: BaseException | None) -> None:
        if token is not None:
            span_id, root_id, parent_id, start_ns, opened, values, links = token
            self._open.remove((root_id, span_id, self._role, values))
            leave(opened)
            end_ns, problem = monotonic_ns(), error_type(error)
            self._write(span_id, root_id, parent_id, start_ns, end_ns, values, problem, links)


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True
