"""A recorder without a file: what it takes becomes spans in its own process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import MutableMapping, Sequence

from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record.open_steps import OpenSteps
from sgl_aspects.tracing.record.recorder import SpanWriter, span_writer
from sgl_aspects.tracing.record.steps import spans_of
from sgl_aspects.tracing.records import SpanEnd, SpanType


class InProcess(ABC):
    """The part of a :class:`.recorder.Recorder` that is the same whatever is done with the spans."""

    def __init__(self) -> None:
        self.steps = OpenSteps.in_memory()
        self.steps.words[layout.WORD_SAMPLE] = layout.SAMPLE_ALL
        self.texts = [""]
        #: The requests that a step links to, by the group's key.
        self.groups: MutableMapping[int, Sequence[int]] = {}

    @abstractmethod
    def take(self, span: SpanEnd) -> None:
        """Take a span that has ended."""

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

    def spans(self, type: SpanType) -> SpanWriter:
        return span_writer(type, self.take)

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
        for span in spans_of(words, self.texts.__getitem__, self.groups.get(words[layout.STEP_GROUP], ())):
            self.take(span)
