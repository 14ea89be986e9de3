"""The OTLP-JSON file exporter: one ``TracesData`` object per line, as in the OTLP file format."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from sgl_aspects.tracing.export.shared_file import SharedFile

_IDS = ("traceId", "spanId", "parentSpanId")


class OtlpJsonFileExporter(SpanExporter):
    """Appends whole lines to ``path``, which is truncated first unless ``append``.

    Raises ``OSError`` at once if the file cannot be written.
    """

    def __init__(self, path: str, *, append: bool = False) -> None:
        self._file = SharedFile(path, append=append)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._file.is_closed:  # the time for the last flush has passed
            return SpanExportResult.FAILURE
        line = json.dumps(to_json(spans), separators=(",", ":")) + "\n"
        with self._file.locked() as size:
            self._file.write(line.encode(), size)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def to_json(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """Encode the spans as OTLP/JSON: protobuf's JSON, but enums as numbers and ids in hexadecimal."""
    data: dict[str, Any] = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for resource_spans in data.get("resourceSpans", ()):
        for scope_spans in resource_spans.get("scopeSpans", ()):
            for span in scope_spans.get("spans", ()):
                _ids_to_hex(span)
                for link in span.get("links", ()):
                    _ids_to_hex(link)
    return data


def _ids_to_hex(message: dict[str, Any]) -> None:
    for name in _IDS:
        if name in message:
            message[name] = base64.b64decode(message[name]).hex()
