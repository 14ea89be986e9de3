"""Where a request's trace comes from: the caller's headers, the caller's open span, or nowhere.

Read without OpenTelemetry, which the engine's processes do not have to load: the W3C trace context
is one header with fixed fields.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias, cast

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
    """A span of ours that is open where code runs. ``trace``: its root's; None: it follows from the id."""

    root_id: int
    span_id: int
    trace: TraceContext | None = None

    @property
    def trace_id(self) -> int:
        return trace_id_of_root(self.root_id) if self.trace is None else self.trace.trace_id


_open_span: ContextVar[OpenSpan | None] = ContextVar("sgl_aspects_open_span", default=None)
_get, _set, _modules, _new = _open_span.get, _open_span.set, sys.modules, tuple.__new__

#: What is open, what was open around it, and OpenTelemetry's context there: for ``close_span``.
Opened: TypeAlias = "tuple[OpenSpan, OpenSpan | None, Any]"


def open_span(root_id: int, span_id: int, trace: TraceContext | None = None, span: Any = None) -> Opened:
    """Makes a span of ours the current one, until ``close_span`` of what this gives.

    In a process that uses OpenTelemetry it is OpenTelemetry's current span, too: other people's spans nest
    in it, and clients send its ``traceparent``. ``span``: OpenTelemetry's own object for it, if there is one.
    """
    # Several times a step: what can be had without a call of a Python function is.
    opened = _new(OpenSpan, (root_id, span_id, trace))
    outer = _get()
    _set(opened)
    if _otel is None and ("opentelemetry.trace" not in _modules or _find_opentelemetry() is None):
        return opened, outer, None
    make_span, key, make_context, get_current, attach = cast(_OpenTelemetry, _otel)
    before = get_current()
    # What set_span_in_context does, in a third of the time.
    attach(make_context({**before, key: make_span(opened) if span is None else span}))
    return opened, outer, before


def close_span(opened: Opened) -> None:
    """What was current before is current again.

    A coroutine may be closed where it never ran, by the garbage collector or another task: nothing of it is
    open there, so that nothing is changed. (OpenTelemetry's tokens would be refused there.)
    """
    span, outer, before = opened
    if _get() is not span:
        return
    _set(outer)
    if before is not None and _otel is not None:
        _otel.attach(before)


def innermost() -> OpenSpan | None:
    """The span of ours that is open here."""
    return _get()


class _OpenTelemetry(NamedTuple):
    """What is needed to make a span current, looked up once."""

    make_span: Callable[[OpenSpan], Any]
    key: str
    make_context: Callable[[dict[str, object]], Any]
    get_current: Callable[[], Any]
    attach: Callable[[Any], object]


_otel: _OpenTelemetry | None = None


def _find_opentelemetry() -> _OpenTelemetry | None:
    global _otel
    if "opentelemetry.trace" not in sys.modules or "opentelemetry.context" not in sys.modules:
        return None
    from opentelemetry import context, trace

    class CurrentSpan(trace.NonRecordingSpan):
        """Its context is built when somebody asks."""

        def __init__(self, span: OpenSpan) -> None:
            self._span = span

        def get_span_context(self) -> trace.SpanContext:
            span, origin = self._span, self._span.trace
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if origin is None or origin.sampled else 0)
            state = trace.TraceState.from_header([origin.state]) if origin and origin.state else None
            return trace.SpanContext(span.trace_id, span.span_id, False, flags, state)

    (key,) = trace.set_span_in_context(trace.INVALID_SPAN, context.Context())
    _otel = _OpenTelemetry(CurrentSpan, key, context.Context, context.get_current, context.attach)
    return _otel
