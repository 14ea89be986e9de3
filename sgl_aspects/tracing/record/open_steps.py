"""The blocks in which steps are open.

While a step runs, its timestamps are stored straight into a block of the ring's header: one word each, read
by the collector if the process is killed. When its result has been processed, the block is copied into a
slot, from which the reader makes the step's spans (:mod:`.steps`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from sgl_aspects.tracing.record import format as layout
from sgl_aspects.tracing.record import native


class OpenSteps(native.Blocks):
    """The blocks of one header: ``words`` are its 64-bit numbers, ``memory`` its bytes.

    ``take`` returns the first word of a free block (``IndexError``: none is free), ``give_back`` frees it.
    Call ``retire`` before the memory is released or replaced.
    """

    __slots__ = ("_free", "give_back", "memory", "take", "words")

    def __init__(self, memory: Any, words: Any) -> None:
        self.memory, self.words = memory, words
        self.map(memory)
        self._free = [
            layout.OPEN_STEPS_WORD + number * layout.STEP_WORDS for number in range(layout.OPEN_STEPS)
        ]
        self.take: Callable[[], int] = self._free.pop
        self.give_back: Callable[[int], None] = self._free.append

    @classmethod
    def in_memory(cls, control: Iterable[int] = ()) -> OpenSteps:
        """Blocks without a file. ``control``: the words of the control block."""
        memory = bytearray(layout.HEADER_BYTES)
        steps = cls(memory, memoryview(memory).cast("Q"))
        for word, value in enumerate(control, layout.WORD_LEVEL):
            steps.words[word] = value
        return steps
