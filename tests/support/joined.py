"""A joiner for tests, without processes that write its records."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.resources import Resource

from sgl_aspects.tracing.collect.join import Joiner
from sgl_aspects.tracing.context import TraceContext
from sgl_aspects.tracing.records import RequestBegin, RequestSent


class Writer:
    """The part of a ring's reader that the joiner uses."""

    process_id = 1
    was_detached = is_counted = False

    def __init__(self, name: str) -> None:
        self.name, self.last_ns = name, 9

    def open_steps(self) -> tuple[()]:
        return ()


class Joined(Joiner):
    """A joiner that keeps its spans, with the records of a caller's process and of a scheduler's."""

    def __init__(self, **options: Any) -> None:
        self.spans: list[Any] = []
        super().__init__(Resource({}), lambda span: self.spans.append(span.readable()), **options)
        self.caller: Any = Writer("1")
        self.scheduler: Any = Writer("2")

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.spans]

    def of_caller(self, *records: Any) -> None:
        self.add(self.caller, *records)

    def of_scheduler(self, *records: Any) -> None:
        self.add(self.scheduler, *records)

    def received(self, span_id: int = 7, rid: str = "r", start_ns: int = 5, **trace: Any) -> None:
        """Take what the caller's process writes of a request until it is sent."""
        trace = {"trace_id": 0xABC, **trace}
        begin = RequestBegin(span_id, rid, start_ns, *TraceContext(**trace), "chat m", {})
        self.of_caller(begin, RequestSent(span_id))
