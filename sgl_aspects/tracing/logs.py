"""Adds the ids of the current span to log records.

The attributes are those of OpenTelemetry's own instrumentation (``otelTraceID``, ``otelSpanID``,
``otelTraceSampled``; "0" if no span is open), so that its formats work: ``%(otelTraceID)s``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sgl_aspects.tracing.context import from_current_span, innermost


def correlate_logs() -> Callable[[], None]:
    """Start in this process; returns a function that undoes it, also below a factory set later."""
    inner = logging.getLogRecordFactory()
    is_on = True

    def with_ids(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = inner(*args, **kwargs)
        if is_on:
            trace_id, span_id, sampled = _ids()
            record.otelTraceID = f"{trace_id:032x}" if trace_id else "0"
            record.otelSpanID = f"{span_id:016x}" if span_id else "0"
            record.otelTraceSampled = sampled
        return record

    def undo() -> None:
        nonlocal is_on
        is_on = False
        if logging.getLogRecordFactory() is with_ids:
            logging.setLogRecordFactory(inner)

    logging.setLogRecordFactory(with_ids)
    return undo


def _ids() -> tuple[int, int, bool]:
    """Return the ids of OpenTelemetry's current span, which may be nested in the tracer's."""
    current, span = from_current_span(), innermost()
    if current is not None:
        return current.trace_id, current.parent_id, current.sampled
    if span is None:
        return 0, 0, False
    return span.trace_id, span.span_id, span.trace is None or span.trace.sampled
