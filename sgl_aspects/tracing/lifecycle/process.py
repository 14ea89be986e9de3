"""The description of a process, which is on all of its spans: its server's model and role, its rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_aspects.tracing.record.recorder import Recorder
from sgl_aspects.tracing.records import AttributeValue, ProcessDescribed
from sgl_aspects.tracing.schema import (
    DISAGGREGATION_MODE,
    FOLLOWER,
    NODE_RANK,
    RANK,
    SERVICE_NAME,
    TRANSFER_BACKEND,
)

#: The keys of a description, and the resource attribute for each.
_ATTRIBUTES = {
    "service": SERVICE_NAME,
    "disaggregation_mode": DISAGGREGATION_MODE,
    "transfer_backend": TRANSFER_BACKEND,
    "rank": RANK,
    "node_rank": NODE_RANK,
    "follower": FOLLOWER,
}


class ProcessTracker:
    """Records what is known of its process, and again when more is known."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: dict[str, AttributeValue] = {}

    @property
    def has_service(self) -> bool:
        return SERVICE_NAME in self._known

    def describe(self, description: Mapping[str, Any] | None) -> None:
        """Add to the description; no-op for values that are None or known."""
        values = {_ATTRIBUTES[key]: value for key, value in (description or {}).items()}
        known = self._known | {name: value for name, value in values.items() if value is not None}
        if known != self._known:
            self._known = known
            self._recorder.write(ProcessDescribed(known))
