"""The span of ours that is current where code runs.

A span that is entered is current in its context until it is left. What a scheduler's step has
open costs nothing to be current: it is asked for (:func:`add_source`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, TypeAlias

from sgl_aspects.tracing.context.w3c import TraceContext, trace_id_of_root
from sgl_aspects.tracing.records import SpanType


class OpenSpan(NamedTuple):
    """A span of ours that is open where code runs.

    ``trace``: its root's; None: it follows from the id. ``span``: OpenTelemetry's own object for it, if there
    is one. ``outer``: the fields of the one that was open around it.
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
#: What opening a span gives, for closing it.
Opened: TypeAlias = "Token[Fields | None]"

_fields: ContextVar[Fields | None] = ContextVar("sgl_aspects_open_span", default=None)
_get, _set, _restore = _fields.get, _fields.set, _fields.reset
_sources: list[Callable[[], Fields | None]] = []
_modules = sys.modules
#: Whether the bridge to OpenTelemetry stands.
is_bridged = False


def enter(root_id: int, span_id: int, trace: TraceContext | None = None, span: Any = None) -> Opened:
    """Makes a span of ours the current one, until ``leave`` of what this gives."""
    if not is_bridged and "opentelemetry.trace" in _modules:
        _bridge()
    return _set((root_id, span_id, trace, span, current_fields()))


def enter_span(
    type: SpanType,
    span_id: int,
    root_id: int,
    parent_id: int,
    start_ns: int,
    trace: TraceContext | None = None,
) -> Opened:
    """A recorder's ``enter`` that does no more than :func:`enter`, without the time of a call to it."""
    if not is_bridged and "opentelemetry.trace" in _modules:
        _bridge()
    return _set((root_id, span_id, trace, None, current_fields()))


def _bridge() -> None:
    from sgl_aspects.tracing.context.bridge import bridge_opentelemetry

    bridge_opentelemetry()


def leave(opened: Opened) -> None:
    """What was current before is current again.

    A coroutine may be closed where it never ran, by the garbage collector or another task: nothing of it is
    open there, so that nothing is changed.
    """
    try:
        _restore(opened)
    except (ValueError, RuntimeError):  # in another context, or left before
        return


def innermost() -> OpenSpan | None:
    """The span of ours that is open here."""
    fields = current_fields()
    return None if fields is None else OpenSpan(*fields)


def current_fields() -> Fields | None:
    """Its fields: of what was opened here, or of what a source says, whichever is inside the other."""
    fields = _get()
    for source in _sources:
        found = source()
        if found is not None and (fields is None or fields[0] != found[0]):
            return found
    return fields


def add_source(source: Callable[[], Fields | None]) -> Callable[[], None]:
    """``source`` says which span is open in the thread that asks, always the same object for the same span.

    What this returns takes it away.
    """
    _sources.append(source)
    return lambda: _sources.remove(source)
