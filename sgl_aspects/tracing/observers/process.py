"""What a process is, told once: an engine's roles that begin with ``describe`` read it as ``description``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.observers.observation import Observation
from sgl_aspects.tracing.records import ProcessDescribed
from sgl_aspects.tracing.schema import (
    DISAGGREGATION_MODE,
    NODE_RANK,
    RANK,
    SERVICE_NAME,
    TRANSFER_BACKEND,
)

_ROLES = "describe"
#: What a description may say, and the attribute of the resource that it becomes.
_ATTRIBUTES = {
    "service": SERVICE_NAME,
    "disaggregation_mode": DISAGGREGATION_MODE,
    "transfer_backend": TRANSFER_BACKEND,
    "rank": RANK,
    "node_rank": NODE_RANK,
}


class ProcessObserver:
    """Records the resource attributes of its process: as it begins, and again where more is known later."""

    def __init__(self, trackers: Trackers) -> None:
        self._recorder = trackers.recorder
        self._engine = trackers.engine
        self._told: dict[str, Any] = {}

    def observations(self) -> Iterator[Observation]:
        for role in self._engine.roles:
            if role.startswith(_ROLES):
                describe = self._engine.call_reader(role, "description")

                def enter(args: tuple[Any, ...], kwargs: dict[str, Any], describe: Any = describe) -> Any:
                    self._tell(describe(args, kwargs))
                    return describe, args, kwargs

                def leave(token: Any, result: Any, error: BaseException | None) -> None:
                    describe, args, kwargs = token
                    if error is None:
                        self._tell(describe(args, kwargs))

                yield Observation(role, enter, leave)

    def _tell(self, description: dict[str, Any] | None) -> None:
        said = {_ATTRIBUTES[name]: value for name, value in (description or {}).items()}
        known = {name: value for name, value in said.items() if value is not None}
        if known and known != self._told:
            self._told = known
            self._recorder.write(ProcessDescribed(known))
