"""Prompts and answers in spans: opt-in, truncated, and redacted.

``OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`` turns it on, as in OpenTelemetry's own
instrumentations. The attributes are JSON in the form of the GenAI conventions.
``SGL_ASPECTS_TRACE_REDACT=module:function`` names a function from text to text that is applied to each whole
text before it leaves the process. If it raises, or does not return a text, no content of that request is
recorded.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
from collections.abc import Callable, Iterable

from sgl_aspects import env
from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing import schema

logger = logging.getLogger(__name__)

CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
REDACT = "SGL_ASPECTS_TRACE_REDACT"
LENGTH = "SGL_ASPECTS_TRACE_CONTENT_LENGTH"
INPUT, OUTPUT = schema.INPUT_MESSAGES, schema.OUTPUT_MESSAGES
_YES = ("true", "span_only", "span_and_event")
_NO = ("false", "no_content", "event_only")  # events are not written
# Cap on characters kept of a streamed answer for the redaction.
LONGEST = 1 << 20

Redaction = Callable[[str], str]


class ContentCapture:
    """Builds the attributes. ``length``: characters kept of a prompt and of an answer."""

    def __init__(self, length: int, redaction: str | None = None) -> None:
        self._length = length
        self._redaction = redaction

    @classmethod
    def from_environment(cls) -> ContentCapture | None:
        """Return None unless the environment turns content on. Raises ``ConfigError`` for a wrong value."""
        wanted = env.choice(CAPTURE, (*_YES, *_NO), "false") in _YES
        length = env.integer(LENGTH, 4096, minimum=1, maximum=LONGEST)
        redaction = env.text(REDACT)
        if redaction is not None and not all(redaction.partition(":")):
            raise ConfigError(f"{REDACT}={redaction!r}: write module:function")
        return cls(length, redaction) if wanted else None

    def input(self, messages: Iterable[tuple[str, str]] | None) -> str | None:
        """Return the prompt as pairs of a role and a text, the last messages of a long one; None: do not
        record it.
        """
        if messages is None:
            return None
        shown = self._redacted([*messages])
        return None if shown is None else _json([_message(role, text) for role, text in shown])

    def output(self, text: str | None, finish_reason: str | None) -> str | None:
        """Return the answer as an attribute; None if it is empty or withheld by the redaction."""
        if not text:
            return None
        shown = self._redacted([("assistant", text[:LONGEST])])
        if not shown:
            return None
        return _json([{**_message(*shown[0]), "finish_reason": finish_reason or "error"}])

    def _redacted(self, messages: list[tuple[str, str]]) -> list[tuple[str, str]] | None:
        left, shown = self._length, []
        try:
            redact = _load(self._redaction) if self._redaction else None
            for role, text in reversed(messages):
                if left <= 0:
                    break
                clean = text if redact is None else redact(text)
                if not isinstance(clean, str):
                    raise TypeError(f"it gave {type(clean).__name__}, not a text")
                shown.append((role, clean[:left]))
                left -= len(clean)
        except Exception as error:  # noqa: BLE001 (a user's function, whose argument must not be shown)
            _warn_once(self._redaction or "", type(error).__name__)
            return None
        return shown[::-1]


def _message(role: str, text: str) -> dict[str, object]:
    return {"role": role, "parts": [{"type": "text", "content": text}]}


def _json(messages: list[dict[str, object]]) -> str:
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":"))


@functools.cache
def _load(redaction: str) -> Redaction:
    """Imports the redaction on first use: the engine may extend ``sys.path`` before then."""
    module, _, name = redaction.partition(":")
    found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    if not callable(found):
        raise TypeError(f"{redaction} is not a function")
    return found


@functools.cache
def _warn_once(redaction: str, error: str) -> None:
    """Warns without the error's text, which may hold a part of a prompt."""
    logger.error(
        "prompts and answers are not recorded when the redaction %s=%s fails: %s", REDACT, redaction, error
    )
