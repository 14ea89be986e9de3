"""Attributes of a process, recorded once: roles named ``describe…`` read them as ``description``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_aspects.engines.contract import Observation
from sgl_aspects.tracing.lifecycle import Trackers
from sgl_aspects.tracing.records import ProcessDescribed
from sgl_aspects.tracing.schema import DISAGGREGATION_MODE, NODE_RANK, RANK, SERVICE_NAME, TRANSFER_BACKEND

_ROLES = "describe"
#: The keys of a description, and the resource attribute for each.
_ATTRIBUTES = {
    "service": SERVICE_NAME,
    "disaggregation_mode": DISAGGREGATION_MODE,
    "transfer_backend": TRANSFER_BACKEND,
    "rank": RANK,
    "node_rank": NODE_RANK,
}


class ProcessObserver:
    """Records the resource attributes of its process: at its start, and again when more are known."""

    def __init__(self, trackers: Trackers) -> None:
        self._recorder = trackers.recorder
        self._engine = trackers.engine
        self._written: dict[str, Any] = {}

    def observations(self) -> Iterator[Observation]:
        for role in self._engine.roles:
            if role.startswith(_ROLES):
                describe = self._engine.call_reader(role, "description")

                def enter(args: tuple[Any, ...], kwargs: dict[str, Any], describe: Any = describe) -> Any:
                    self._write(describe(args, kwargs))
                    return describe, args, kwargs

                def leave(token: Any, result: Any, error: BaseException | None) -> None:
                    describe, args, kwargs = token
                    if error is None:
                        self._write(describe(args, kwargs))

                yield Observation(role, enter, leave)

    def _write(self, description: dict[str, Any] | None) -> None:
        values = {_ATTRIBUTES[name]: value for name, value in (description or {}).items()}
        attributes = {name: value for name, value in values.items() if value is not None}
        if attributes and attributes != self._written:
            self._written = attributes
            self._recorder.write(ProcessDescribed(attributes))
