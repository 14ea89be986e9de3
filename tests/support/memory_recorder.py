"""A recorder that keeps its records, with steps expanded into their spans."""

from __future__ import annotations

from typing import Any

from sgl_aspects.tracing.context import Opened, TraceContext
from sgl_aspects.tracing.context import enter as enter_span
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.records import Event, SpanBegin, SpanEnd, SpanType
from sgl_aspects.tracing.sdk import SdkRecorder


class Memory(SdkRecorder):
    def __init__(self) -> None:
        super().__init__(level=3)
        self.ids = 0
        self.new_id = self.next_id
        self.ended: list[SpanEnd] = []
        self.begun: list[SpanBegin] = []
        self.events: list[Event] = []

    def take(self, span: SpanEnd) -> None:
        self.ended.append(span)

    @property
    def level(self) -> int:
        return super().level

    @level.setter
    def level(self, level: int) -> None:
        self.steps.words[layout.WORD_LEVEL] = level

    @property
    def sample(self) -> int:
        return super().sample

    @sample.setter
    def sample(self, sample: int) -> None:
        self.steps.words[layout.WORD_SAMPLE] = sample

    def next_id(self) -> int:
        self.ids += 1
        return self.ids

    def write(self, event: Event) -> None:
        self.events.append(event)

    def announce(self, *fields: Any) -> None:
        self.begun.append(SpanBegin(*fields))

    def open_span(self, *fields: Any) -> None: ...

    def close(self, *, detaches: bool = False) -> None: ...

    def named(self, name: str) -> list[SpanEnd]:
        return [record for record in self.ended if record.type.name == name]


def enter(root_id: int, span_id: int, trace: TraceContext | None = None) -> Opened:
    """Make a span of these ids current, as a recorder does."""
    return enter_span(SpanType("f"), span_id, root_id, root_id, 1, trace)
