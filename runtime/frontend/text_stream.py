"""Incremental detokenization."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_aspects.runtime.loader.tokenizer import Tokenizer

#: The replacement character: decoding gives it for invalid or incomplete UTF-8.
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: Decode again at most this many tokens: enough that a tokenizer sees how the text before them ended.
_WINDOW = 16


class IncrementalDecoder:
    """``add`` returns text once it is final: a character spread over tokens comes with the last of them.

    The pieces, with the result of ``flush``, are exactly the text of all tokens decoded at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        #: Tokens at the start of the window that are context only: their text has been returned.
        self._context = 0
        #: Characters of the window's text that have been returned.
        self._given = 0
        #: Whether the last bytes may become a character with the next token.
        self.is_incomplete = False

    def add(self, token_ids: Sequence[int]) -> str:
        self._window.extend(token_ids)
        text = self._tokenizer.decode(self._window)
        # Only the last bytes can become a character with the next token; they show as one replacement.
        stable = text[:-1] if text.endswith(_REPLACEMENT) else text
        self.is_incomplete = len(stable) < len(text)
        piece = stable[self._given :]
        self._given = max(self._given, len(stable))
        if len(stable) == len(text) and len(self._window) > _WINDOW:
            self._slide()
        return piece

    def flush(self) -> str:
        """Return the text held back by ``add``: bytes that never became a character."""
        text = self._tokenizer.decode(self._window)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _slide(self) -> None:
        """Keep the tokens since the last slide, whose text ended with a whole character, as context."""
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._given = len(self._tokenizer.decode(self._window))


class StopTexts:
    """Cuts a stream of text before the first of the stop texts, holding back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Return the text so far in which no stop text can begin; ``found``: one was found."""
        text = self._held + text
        hits = [index for index in (text.find(stop) for stop in self._stops) if index >= 0]
        if hits:
            self.found = True
            self._held = ""
            return text[: min(hits)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` starts with, short of all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
