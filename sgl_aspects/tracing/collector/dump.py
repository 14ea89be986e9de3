"""The last seconds of a live or dead process, from what its ring still holds."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from sgl_aspects.tracing import schema
from sgl_aspects.tracing.collector.join import Joiner
from sgl_aspects.tracing.context import root_of_trace_id
from sgl_aspects.tracing.records import RequestBegin, RequestSeen
from sgl_aspects.tracing.ring.reader import RingReader

# In seconds: whatever a ring can hold is younger.
_LONGEST = 1e12
# The most requests that are named for a step.
_REQUESTS = 4
FORMATS = ("text", "otlp-json", "perfetto")


def spans_of(rings: Iterable[RingReader], seconds: float) -> list[ReadableSpan]:
    """The spans of the last ``seconds`` before the newest record, joined, by start; open ones too.

    The rings are left as they are: a collector that follows them is not disturbed.
    """
    found: list[ReadableSpan] = []
    joiner = Joiner(Resource.create(), lambda span: found.append(span.readable()), joins_partial=True)
    # The process that received the requests started first: read first, it leaves nothing waiting.
    rings = sorted(rings, key=lambda ring: ring.started_ns)
    for ring in rings:
        ring.skip_to_newest()
        for record in ring.history():
            joiner.add(ring, record)
    newest = max((ring.last_ns for ring in rings), default=0)
    joiner.match_waiting()
    for ring in rings:
        if ring.is_alive():
            ring.last_ns = time.time_ns()  # what is open is open until now
        joiner.writer_gone(ring)
    joiner.finish()
    since = newest - int(min(seconds, _LONGEST) * 1e9)
    return sorted(
        (span for span in found if (span.end_time or 0) >= since), key=lambda span: span.start_time or 0
    )


def request_ids(rings: Iterable[RingReader]) -> dict[int, str]:
    """The requests that the rings tell of, by the ids that their spans and links have."""
    found: dict[int, str] = {}
    for ring in rings:
        for record in ring.history():
            if isinstance(record, RequestBegin):
                found[record.span_id] = record.request_id
            elif isinstance(record, RequestSeen):
                found[record.key] = record.request_id
    return found


def write(spans: Sequence[ReadableSpan], form: str, names: Mapping[int, str] | None = None) -> str:
    """The spans in one of ``FORMATS``. ``names``: of :func:`request_ids`, for the text."""
    if form == "otlp-json":
        from sgl_aspects.tracing.export.otlp_file import to_json

        return json.dumps(to_json(spans)) + "\n"
    if form == "perfetto":
        from sgl_aspects.tracing.export.chrome_trace import Timeline

        return json.dumps({"traceEvents": list(Timeline().events_of(spans))}) + "\n"
    return "".join(_lines(spans, names or {}))


def _lines(spans: Sequence[ReadableSpan], names: Mapping[int, str]) -> Iterator[str]:
    ids = {span.get_span_context().span_id: span for span in spans}  # type: ignore[union-attr]
    for span in spans:
        depth, above = 0, span.parent
        while above is not None and above.span_id in ids and depth < 8:
            depth, above = depth + 1, ids[above.span_id].parent
        start, end = span.start_time or 0, span.end_time or 0
        moment = datetime.datetime.fromtimestamp(start / 1e9).isoformat(timespec="microseconds")[11:]
        process = span.resource.attributes.get("process.pid", "?")
        values = dict(span.attributes or {}).items()
        attributes = " ".join(f"{key.rpartition('.')[2]}={value!s}" for key, value in values)
        request = _request_of(span, names)
        mark = " ERROR" if span.status.status_code is StatusCode.ERROR else ""
        said = f"{span.name}{mark}  {request}{attributes}"
        # A line is a line, and a terminal is told nothing.
        said = "".join(each if each.isprintable() else repr(each)[1:-1] for each in said)
        yield f"{moment} {process!s:>8} {(end - start) / 1e6:10.3f} ms  {'  ' * depth}{said}\n"


def _request_of(span: ReadableSpan, names: Mapping[int, str]) -> str:
    """The requests that a span below a request's, or one that is linked to some, belongs to."""
    context = span.get_span_context()
    if context is None or schema.REQUEST_ID in (span.attributes or {}):
        return ""
    # Where the request itself was not read, its trace is named by its key.
    ids = [root_of_trace_id(context.trace_id), span.parent.span_id if span.parent else 0]
    for link in span.links:
        ids += [root_of_trace_id(link.context.trace_id), link.context.span_id]
    named = list(dict.fromkeys(names[each] for each in ids if each in names))
    more = f",+{len(named) - _REQUESTS}" if len(named) > _REQUESTS else ""
    return f"request={','.join(named[:_REQUESTS])}{more} " if named else ""
