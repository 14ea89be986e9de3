"""Context: W3C headers, the tracer's current span, and the bridge to OpenTelemetry."""

from sgl_aspects.tracing.context.bridge import (
    bridge_opentelemetry,
    enter,
    from_current_span,
    of_request,
)
from sgl_aspects.tracing.context.current import Fields, Opened, OpenSpan, add_source, given, innermost, leave
from sgl_aspects.tracing.context.w3c import (
    TraceContext,
    from_headers,
    is_wanted,
    new,
    of_shared,
    root_of_trace_id,
    span_id_of_shared,
    trace_id_of_root,
)

__all__ = [
    "Fields",
    "OpenSpan",
    "Opened",
    "TraceContext",
    "add_source",
    "bridge_opentelemetry",
    "enter",
    "from_current_span",
    "from_headers",
    "given",
    "innermost",
    "is_wanted",
    "leave",
    "new",
    "of_request",
    "of_shared",
    "root_of_trace_id",
    "span_id_of_shared",
    "trace_id_of_root",
]
