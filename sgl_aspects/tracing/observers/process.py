"""The description of a process, at its start: roles named ``describe…`` read it as ``description``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing.lifecycle import Trackers

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
