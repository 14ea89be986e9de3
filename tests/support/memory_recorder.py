"""A recorder that keeps its records, with steps expanded into their spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sgl_aspects.tracing.context import Opened, TraceContext
from sgl_aspects.tracing.context import enter as enter_span
from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.open_steps import OpenSteps
from sgl_aspects.tracing.record.recorder import SpanWriter, span_writer
from sgl_aspects.tracing.record.steps import spans_of
from sgl_aspects.tracing.records import Event, SpanBegin, SpanEnd, SpanType


@dataclass
class Memory:
    ended: list[SpanEnd] = field(default_factory=list)
    begun: list[SpanBegin] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    ids: int = 0
    steps: OpenSteps = field(default_factory=OpenSteps.in_memory)
    texts: list[str] = field(default_factory=lambda: [""])
    groups: dict[int, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.level, self.sample = 3, layout.SAMPLE_ALL

    @property
    def level(self) -> int:
        return int(self.steps.words[layout.WORD_LEVEL])

    @level.setter
    def level(self, level: int) -> None:
        self.steps.words[layout.WORD_LEVEL] = level

    @property
    def sample(self) -> int:
        return int(self.steps.words[layout.WORD_SAMPLE])

    @sample.setter
    def sample(self, sample: int) -> None:
        self.steps.words[layout.WORD_SAMPLE] = sample

    def open(self) -> bool:
        return True

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    def write(self, event: Event) -> None:
        self.events.append(event)

    def announce(self, *fields: Any) -> None:
        self.begun.append(SpanBegin(*fields))

    def spans(self, type: SpanType) -> SpanWriter:
        return span_writer(type, self.ended.append)

    enter = staticmethod(enter_span)

    def open_span(self, *fields: Any) -> None: ...

    def text(self, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text)

    def write_group(self, key: int, links: Sequence[int]) -> bool:
        self.groups[key] = [*links]
        return True

    def end_step(self, steps: OpenSteps, block: int) -> None:
        words = steps.words[block : block + layout.STEP_WORDS].tolist()
        steps.words[block] = 0
        links = self.groups.get(words[layout.STEP_GROUP], ())
        self.ended += spans_of(words, self.texts.__getitem__, links)

    def close(self) -> None: ...

    def named(self, name: str) -> list[SpanEnd]:
        return [record for record in self.ended if record.type.name == name]


def enter(root_id: int, span_id: int, trace: TraceContext | None = None) -> Opened:
    """Make a span of these ids current, as a recorder does."""
    return enter_span(SpanType("f"), span_id, root_id, root_id, 1, trace)
