"""Reads the last seconds of a live or dead process from the records still in its ring."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from sgl_aspects.terminal import printable
from sgl_aspects.tracing import schema
from sgl_aspects.tracing.collect.join import Joiner
from sgl_aspects.tracing.collect.reader import RingReader
from sgl_aspects.tracing.context import root_of_trace_id
from sgl_aspects.tracing.records import RequestBegin, RequestSeen

# In seconds, longer than any ring's contents.
_LONGEST = 1e12
# Cap on requests named for a step.
_REQUESTS = 4
FORMATS = ("text", "otlp-json", "perfetto")


def spans_of(rings: Iterable[RingReader], seconds: float) -> list[ReadableSpan]:
    """Return the joined spans of the last ``seconds`` before the newest record, by start, open ones included.

    The rings' read positions are unchanged, so a running collector is not disturbed.
    """
    found: list[ReadableSpan] = []
    joiner = Joiner(Resource.create(), lambda span: found.append(span.readable()), joins_partial=True)
    # The process that received the requests started first: read it first, so that later records find them.
    rings = sorted(rings, key=lambda ring: ring.started_ns)
    for ring in rings:  # spans name their rank if there are several
        joiner.add(ring, *ring.descriptions())
    histories = []
    for ring in rings:  # all at once, since their processes go on
        ring.skip_to_newest()
        histories.append((ring, [*ring.history()]))
    for ring, records in histories:
        joiner.add(ring, *records)
    newest = max((ring.last_ns for ring in rings), default=0)
    joiner.match_waiting()
    for ring in rings:
        if ring.is_alive():
            ring.last_ns = ring.now_ns()  # open spans end at the time of the dump
        joiner.writer_gone(ring)
    joiner.finish()
    since = newest - int(min(seconds, _LONGEST) * 1e9)
    return sorted(
        (span for span in found if (span.end_time or 0) >= since), key=lambda span: span.start_time or 0
    )


def request_ids(rings: Iterable[RingReader]) -> dict[int, str]:
    """Return the requests in the rings, keyed by the span ids that spans and links refer to."""
    found: dict[int, str] = {}
    for ring in rings:
        for record in ring.history():
            if isinstance(record, RequestBegin):
                found[record.span_id] = record.request_id
            elif isinstance(record, RequestSeen):
                found[record.key] = record.request_id
    return found


def write(spans: Sequence[ReadableSpan], form: str, names: Mapping[int, str] | None = None) -> str:
    """Format the spans in one of ``FORMATS``. ``names``: from :func:`request_ids`, for the text format."""
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
        values = dict(span.attributes or {}).items()  # a value may have two names that end alike
        attributes = " ".join(dict.fromkeys(f"{key.rpartition('.')[2]}={value!s}" for key, value in values))
        request = _request_of(span, names)
        mark = " ERROR" if span.status.status_code is StatusCode.ERROR else ""
        line = f"{moment} {process!s:>8} {(end - start) / 1e6:10.3f} ms  {'  ' * depth}{span.name}{mark}  "
        yield printable(f"{line}{request}{attributes}").replace("\n", "\\n") + "\n"  # one for each span


def _request_of(span: ReadableSpan, names: Mapping[int, str]) -> str:
    """Names the requests that a span below a request belongs to, or that it links to."""
    context = span.get_span_context()
    if context is None or schema.REQUEST_ID in (span.attributes or {}):
        return ""
    # If the request itself was not read, its trace is named by its key.
    ids = [root_of_trace_id(context.trace_id), span.parent.span_id if span.parent else 0]
    for link in span.links:
        ids += [root_of_trace_id(link.context.trace_id), link.context.span_id]
    named = list(dict.fromkeys(names[each] for each in ids if each in names))
    more = f",+{len(named) - _REQUESTS}" if len(named) > _REQUESTS else ""
    return f"request={','.join(named[:_REQUESTS])}{more} " if named else ""
