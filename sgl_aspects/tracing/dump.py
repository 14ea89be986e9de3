"""The last seconds of a live or dead process, from what its ring still holds."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterable, Iterator, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from sgl_aspects.tracing.collector.join import Joiner
from sgl_aspects.tracing.ring.reader import RingReader

# In seconds: whatever a ring can hold is younger.
_LONGEST = 1e12
FORMATS = ("text", "otlp-json", "perfetto")


def spans_of(rings: Iterable[RingReader], seconds: float) -> list[ReadableSpan]:
    """The spans of the last ``seconds`` before the newest record, joined, by start; open ones too.

    The rings are left as they are: a collector that follows them is not disturbed.
    """
    found: list[ReadableSpan] = []
    joiner = Joiner(Resource.create(), found.append, joins_partial=True)
    # Whoever received the requests was there first: what the others say of them need not wait.
    rings = sorted(rings, key=lambda ring: ring.started_ns)
    for ring in rings:
        ring.skip_to_newest()
        for record in ring.history():
            joiner.add(ring, record)
    newest = max((ring.last_ns for ring in rings), default=0)
    joiner.settle()
    for ring in rings:
        if ring.is_alive():
            ring.last_ns = time.time_ns()  # what is open is open until now
        joiner.writer_gone(ring)
    joiner.finish()
    since = newest - int(min(seconds, _LONGEST) * 1e9)
    return sorted(
        (span for span in found if (span.end_time or 0) >= since), key=lambda span: span.start_time or 0
    )


def write(spans: Sequence[ReadableSpan], form: str) -> str:
    """The spans in one of ``FORMATS``."""
    if form == "otlp-json":
        from sgl_aspects.tracing.export.otlp_file import to_json

        return json.dumps(to_json(spans)) + "\n"
    if form == "perfetto":
        from sgl_aspects.tracing.export.chrome_trace import Timeline

        return json.dumps({"traceEvents": list(Timeline().events_of(spans))}) + "\n"
    return "".join(_lines(spans))


def _lines(spans: Sequence[ReadableSpan]) -> Iterator[str]:
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
        mark = " ERROR" if span.status.status_code is StatusCode.ERROR else ""
        said = f"{span.name}{mark}  {attributes}"
        # A line is a line, and a terminal is told nothing.
        said = "".join(each if each.isprintable() else repr(each)[1:-1] for each in said)
        yield f"{moment} {process!s:>8} {(end - start) / 1e6:10.3f} ms  {'  ' * depth}{said}\n"
