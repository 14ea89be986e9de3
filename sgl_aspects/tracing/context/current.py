"""The tracer's current span.

A span that :mod:`.bridge` enters is current in its context until it is left. The open span of a step is
computed on demand (:func:`add_source`), so that entering it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, TypeAlias

from sgl_aspects.tracing.context.w3c import TraceContext, trace_id_of_root


class OpenSpan(NamedTuple):
    """The innermost open span of the tracer.

    ``trace``: its root's; None: derived from the id. ``span``: OpenTelemetry's own object for it, if there is
    one. ``outer``: the fields of the enclosing open span.
    """

    root_id: int
    span_id: int
    trace: TraceContext | None
    span: Any
    outer: Fields | None

    @property
    def trace_id(self) -> int:
        return trace_id_of_root(self.root_id) if self.trace is None else self.trace.trace_id


#: The fields of an ``OpenSpan``: a plain tuple takes a fifth of the time to make.
Fields: TypeAlias = "tuple[int, int, TraceContext | None, Any, Any]"
#: The token that opening a span returns, for closing it.
Opened: TypeAlias = "Token[Fields | None]"

_fields: ContextVar[Fields | None] = ContextVar("sgl_aspects_open_span", default=None)
_get, _restore = _fields.get, _fields.reset
#: Makes the span with these fields the current one until ``leave`` is called with the result.
set_current: Callable[[Fields], Opened] = _fields.set
#: What the program has set on its current span, by the id of each open span that takes attributes.
given: dict[int, dict[str, Any]] = {}
_sources: list[Callable[[], Fields | None]] = []


def leave(opened: Opened) -> None:
    """Restore the previous current span.

    A coroutine may be closed where it never ran, by the garbage collector or another task: its span is not
    open there, so nothing changes.
    """
    try:
        _restore(opened)
    except (ValueError, RuntimeError):  # in another context, or left before
        return


def innermost() -> OpenSpan | None:
    """Return the innermost span of the tracer that is open here."""
    fields = current_fields()
    return None if fields is None else OpenSpan(*fields)


def current_fields() -> Fields | None:
    """Return the fields of the innermost open span, whether entered here or reported by a source."""
    fields = _get()
    for source in _sources:
        found = source()
        if found is not None and (fields is None or fields[0] != found[0]):
            return found
    return fields


def add_source(source: Callable[[], Fields | None]) -> Callable[[], None]:
    """Add a function that returns the span open in the calling thread, always the same object for a span.

    Returns a function that removes it.
    """
    _sources.append(source)
    return lambda: _sources.remove(source)
