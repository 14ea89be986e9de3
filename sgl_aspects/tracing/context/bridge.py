"""The bridge to OpenTelemetry: the tracer's current span is OpenTelemetry's current span, and vice versa.

Spans of other instrumentations nest in the tracer's, and clients send its ``traceparent``. Opens outnumber
reads, so the OpenTelemetry context is built lazily.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from typing import Any

from sgl_aspects import compat
from sgl_aspects.tracing.context.current import Fields, Opened, OpenSpan, current_fields, given, set_current
from sgl_aspects.tracing.context.w3c import TraceContext, from_headers, is_wanted, new, of_shared
from sgl_aspects.tracing.records import SpanType

logger = logging.getLogger(__name__)

_modules = sys.modules
_joining = threading.Lock()
_is_bridged = False


def enter(
    type: SpanType,
    span_id: int,
    root_id: int,
    parent_id: int,
    start_ns: int,
    trace: TraceContext | None = None,
    *,
    span: Any = None,
) -> Opened:
    """Make a span the current one until ``leave`` is called with the result: a recorder's ``enter``.

    ``span``: OpenTelemetry's object for it, if there is one.
    """
    if not _is_bridged and "opentelemetry.trace" in _modules:
        bridge_opentelemetry()
    return set_current((root_id, span_id, trace, span, current_fields()))


def from_current_span() -> TraceContext | None:
    """The context of the OpenTelemetry span open in this thread; None if OpenTelemetry is not in use."""
    trace = _modules.get("opentelemetry.trace")
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


def of_request(
    headers: Mapping[str, str] | None,
    sample: int = 1 << 32,
    parent_based: bool = True,
    shared: tuple[int, bool] | None = None,
) -> TraceContext:
    """Return the trace context of the headers, else of the current span, else a new trace.

    ``shared``: the arguments of ``of_shared`` for a request that several servers get.

    The caller decides whether the trace is sampled; ``sample`` applies to new traces only, or to all if not
    ``parent_based``.
    """
    found = from_headers(headers) or from_current_span()
    if found is None:
        return new(sample) if shared is None else of_shared(*shared, sample)
    return found if parent_based else found._replace(sampled=is_wanted(found.trace_id, sample))


def bridge_opentelemetry() -> None:
    """Make the tracer's open spans OpenTelemetry's current span; no-op while OpenTelemetry is not loaded."""
    global _is_bridged
    if _is_bridged or not hasattr(_modules.get("opentelemetry.trace"), "set_span_in_context"):
        return  # or half loaded
    with _joining:
        if not _is_bridged:
            _join()
            _is_bridged = True


def _join() -> None:
    from opentelemetry import context, trace

    base = compat.runtime_context_class()
    if base is None:
        logger.warning(
            "this version of OpenTelemetry keeps its current context elsewhere: spans of your own are not "
            "children of the engine's, which are recorded nonetheless"
        )
        return
    (key,) = trace.set_span_in_context(trace.INVALID_SPAN, context.Context())

    class CurrentSpan(trace.NonRecordingSpan):
        """A span whose context is built on first read; that of a traced function takes attributes."""

        def __init__(self, span: OpenSpan) -> None:
            self._span = span

        def get_span_context(self) -> trace.SpanContext:
            span, origin = self._span, self._span.trace
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if origin is None or origin.sampled else 0)
            state = trace.TraceState.from_header([origin.state]) if origin and origin.state else None
            return trace.SpanContext(span.trace_id, span.span_id, False, flags, state)

        def is_recording(self) -> bool:
            return self._span.span_id in given

        def set_attribute(self, key: str, value: Any) -> None:
            self.set_attributes({key: value})

        def set_attributes(self, attributes: Mapping[str, Any]) -> None:
            taken = given.get(self._span.span_id)
            if taken is not None:
                taken.update(attributes)

    class Attached(context.Context):
        """A context attached by other code while the span ``inside`` was open, so that span is below it."""

        inside: Fields

    class RuntimeContext(base):  # type: ignore[misc, valid-type]
        """The process's context, ``inner``, with the tracer's spans opened since then on top of it."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def get_current(self) -> context.Context:
            found, opened = self.inner.get_current(), current_fields()
            covered = found.inside if isinstance(found, Attached) else None
            while covered is not None and covered is not opened:
                covered = covered[4]
            if opened is None or opened is covered:
                return found  # type: ignore[no-any-return]
            span = OpenSpan(*opened)
            return context.Context({**found, key: CurrentSpan(span) if span.span is None else span.span})

        def attach(self, context: Any) -> Any:
            opened = current_fields()
            if opened is not None:
                context = Attached(context)
                context.inside = opened
            return self.inner.attach(context)

        def detach(self, token: Any) -> None:
            self.inner.detach(token)

    compat.replace_runtime_context(RuntimeContext)
