"""Where a request's trace comes from: the caller's headers, the caller's open span, or nowhere.

Read without OpenTelemetry, which the engine's processes do not have to load: the W3C trace context
is one header with fixed fields.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Mapping
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, TypeAlias

from sgl_aspects.tracing.records import SpanType

# version "-" trace-id "-" parent-id "-" flags; a version above 00 may carry more fields.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_LONGEST_STATE = 8192


class TraceContext(NamedTuple):
    """The trace that a request belongs to, and the span that called it (``parent_id`` 0: none)."""

    trace_id: int
    parent_id: int = 0
    sampled: bool = True
    state: str = ""
    remote: bool = False


def from_headers(headers: Mapping[str, str] | None) -> TraceContext | None:
    """The W3C context in ``headers``, whatever the case of their names; None where it is absent or invalid.

    An invalid ``traceparent`` is ignored together with its ``tracestate``, as the standard asks.
    """
    if not headers:
        return None
    fields = {str(name).lower(): value for name, value in headers.items()}
    value = fields.get("traceparent")
    match = _TRACEPARENT.fullmatch(value.strip(" \t")) if isinstance(value, str) else None
    if match is None:
        return None
    version, trace_id, parent_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(parent_id, 16):
        return None
    state = fields.get("tracestate")
    if not isinstance(state, str) or len(state) > _LONGEST_STATE:
        state = ""
    return TraceContext(int(trace_id, 16), int(parent_id, 16), bool(int(flags, 16) & 1), state, True)


def from_current_span() -> TraceContext | None:
    """The context of the OpenTelemetry span open in this thread; None where nobody uses OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return TraceContext(
        context.trace_id,
        context.span_id,
        context.trace_flags.sampled,
        context.trace_state.to_header(),
        context.is_remote,
    )


def new(sample: int = 1 << 32) -> TraceContext:
    """A trace of its own, with 128 random bits for its id. ``sample``: so many in 2**32 are wanted.

    Decided by the id, as OpenTelemetry's ratio sampler does it, so that every service decides the same.
    """
    trace_id = int.from_bytes(os.urandom(16), "big") or 1
    return TraceContext(trace_id, sampled=is_wanted(trace_id, sample))


def is_wanted(trace_id: int, sample: int) -> bool:
    """Whether the trace is one of the ``sample`` in 2**32."""
    return (trace_id >> 32 & 0xFFFF_FFFF) < sample


def of_request(
    headers: Mapping[str, str] | None, sample: int = 1 << 32, asks_parent: bool = True
) -> TraceContext:
    """The headers' context before the current span's, and a new trace where there is neither.

    Who called has decided whether the trace is wanted; only for a new one is ``sample`` asked, unless it is
    not to be ``asks_parent``.
    """
    found = from_headers(headers) or from_current_span()
    if found is None:
        return new(sample)
    return found if asks_parent else found._replace(sampled=is_wanted(found.trace_id, sample))


_SPREAD = 0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835
_GATHER = pow(_SPREAD, -1, 1 << 128)


def trace_id_of_root(span_id: int) -> int:
    """The trace of a root that no request brought along: every process can tell it from the span's id."""
    return (span_id * _SPREAD) % (1 << 128) or 1


def root_of_trace_id(trace_id: int) -> int:
    """The root whose trace :func:`trace_id_of_root` named so; 0 where the id came from elsewhere."""
    root = (trace_id * _GATHER) % (1 << 128)
    return root if root < 1 << 64 else 0


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


#: The fields of an ``OpenSpan``. A step opens several: a plain tuple takes a fifth of the time.
Fields: TypeAlias = "tuple[int, int, TraceContext | None, Any, Any]"
#: What opening a span gives, for closing it.
Opened: TypeAlias = "Token[Fields | None]"

_fields: ContextVar[Fields | None] = ContextVar("sgl_aspects_open_span", default=None)
_get, _set, restore, _modules = _fields.get, _fields.set, _fields.reset, sys.modules
#: What ``restore`` raises where the span is not open: in another context, or because it was closed before.
NOT_OPEN = (ValueError, RuntimeError)
_has_joined = False
_joining = threading.Lock()


def open_span(root_id: int, span_id: int, trace: TraceContext | None = None, span: Any = None) -> Opened:
    """Makes a span of ours the current one, until ``close_span`` of what this gives, or its being written.

    In a process that uses OpenTelemetry it is OpenTelemetry's current span, too: other people's spans nest
    in it, and clients send its ``traceparent``.
    """
    if not _has_joined and "opentelemetry.trace" in _modules:
        _join_opentelemetry()
    return _set((root_id, span_id, trace, span, _get()))


def begin_span(
    type: SpanType,
    span_id: int,
    root_id: int,
    parent_id: int,
    start_ns: int,
    trace: TraceContext | None = None,
) -> Opened:
    """A recorder's ``begin`` that does no more than ``open_span``, without the time of a call to it."""
    if not _has_joined and "opentelemetry.trace" in _modules:
        _join_opentelemetry()
    return _set((root_id, span_id, trace, None, _get()))


def close_span(opened: Opened) -> None:
    """What was current before is current again.

    A coroutine may be closed where it never ran, by the garbage collector or another task: nothing of it is
    open there, so that nothing is changed.
    """
    try:
        restore(opened)
    except NOT_OPEN:
        return


def innermost() -> OpenSpan | None:
    """The span of ours that is open here."""
    fields = _get()
    return None if fields is None else OpenSpan(*fields)


def _join_opentelemetry() -> None:
    """From here on who asks OpenTelemetry what is current gets our spans, too; not while it is half loaded.

    Asked is seldom, opened is often: so nothing is told to OpenTelemetry when a span opens, and its context
    with our span in it is made when somebody asks.
    """
    global _has_joined
    if not hasattr(sys.modules["opentelemetry.trace"], "set_span_in_context"):
        return
    from opentelemetry import context, trace
    from opentelemetry.context.context import _RuntimeContext

    (key,) = trace.set_span_in_context(trace.INVALID_SPAN, context.Context())

    class CurrentSpan(trace.NonRecordingSpan):
        """Its context is built when somebody asks."""

        def __init__(self, span: OpenSpan) -> None:
            self._span = span

        def get_span_context(self) -> trace.SpanContext:
            span, origin = self._span, self._span.trace
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if origin is None or origin.sampled else 0)
            state = trace.TraceState.from_header([origin.state]) if origin and origin.state else None
            return trace.SpanContext(span.trace_id, span.span_id, False, flags, state)

    class Attached(context.Context):
        """What others made current inside a span of ours, ``inside``: that one is not on top of it."""

        inside: Fields

    class RuntimeContext(_RuntimeContext):
        """The process's own, ``inner``, and on top of what is current there the spans of ours since then."""

        def __init__(self, inner: _RuntimeContext) -> None:
            self.inner = inner

        def get_current(self) -> context.Context:
            found, opened = self.inner.get_current(), _get()
            covered = found.inside if isinstance(found, Attached) else None
            while covered is not None and covered is not opened:
                covered = covered[4]
            if opened is None or opened is covered:
                return found
            span = OpenSpan(*opened)
            return context.Context({**found, key: CurrentSpan(span) if span.span is None else span.span})

        def attach(self, context: Any) -> Any:
            opened = _get()
            if opened is not None:
                context = Attached(context)
                context.inside = opened
            return self.inner.attach(context)

        def detach(self, token: Any) -> None:
            self.inner.detach(token)

    with _joining:
        if not _has_joined:
            context._RUNTIME_CONTEXT = RuntimeContext(context._RUNTIME_CONTEXT)
            _has_joined = True
