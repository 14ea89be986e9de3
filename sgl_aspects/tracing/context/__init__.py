"""Context: W3C's headers, the span of ours that is current, and the bridge to OpenTelemetry."""

from sgl_aspects.tracing.context.bridge import bridge_opentelemetry, from_current_span, of_request
from sgl_aspects.tracing.context.current import (
    NOT_OPEN,
    Fields,
    Opened,
    OpenSpan,
    add_source,
    begin_span,
    close_span,
    innermost,
    open_span,
    restore,
)
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
    "NOT_OPEN",
    "Fields",
    "OpenSpan",
    "Opened",
    "TraceContext",
    "add_source",
    "begin_span",
    "bridge_opentelemetry",
    "close_span",
    "from_current_span",
    "from_headers",
    "innermost",
    "is_wanted",
    "new",
    "of_request",
    "of_shared",
    "open_span",
    "restore",
    "root_of_trace_id",
    "span_id_of_shared",
    "trace_id_of_root",
]
