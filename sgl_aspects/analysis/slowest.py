"""Causes as attributes of the spans of slow requests, while the run's collector hands spans on."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from functools import cached_property

from opentelemetry.trace import SpanKind

from sgl_aspects.analysis.causes import Causes, Explanation
from sgl_aspects.analysis.spans import Span, span_of
from sgl_aspects.tracing import schema
from sgl_aspects.tracing.collect.roots import Root
from sgl_aspects.tracing.export.span import CollectedSpan
from sgl_aspects.tracing.records import Latest, RequestBegin

# Those that causes are read from, beside the requests.
_READ = {
    *schema.PHASES,
    *(one.name for one in (schema.STEP, schema.FORWARD, schema.TOKENIZE, schema.PREFILL)),
    schema.DETOKENIZE.name,
}
# Cap on spans held, and on requests known: some kilobytes for each step of the last minutes.
_MOST = 50_000
# Of the requests that end at once, the slowest are explained, and in no more than this share of the time.
_AT_ONCE, _SHARE = 10, 0.2
_CULPRITS = 3
# Spans so long before a request are read, too: they tell what a decode step usually takes, and what is full.
_BEFORE_NS = 1_000_000_000


class _Held:
    """A span that is converted when a slow request needs it: few do, and that takes as long as to join it."""

    def __init__(self, span: CollectedSpan) -> None:
        self._collected, self.end_ns = span, span.end_ns

    @cached_property
    def span(self) -> Span:
        return span_of(self._collected.readable())


class SlowRequests:
    """Explains requests that took ``seconds`` or more, from the latest spans of their run.

    One that began before the held spans gets no causes, nor one that ends while there is no time for it.
    """

    def __init__(self, seconds: float, most: int = _MOST) -> None:
        self._slow_ns, self._most = seconds * 1e9, most
        self._held: deque[_Held] = deque()
        self._requests: Latest[str, Span] = Latest(most)  # and their answers, by span id
        self._complete_since = 0
        self._pause_until = 0.0

    def explain(self, spans: list[CollectedSpan]) -> None:
        """Replace those of slow requests in the list, each of which ended after its children."""
        slow: list[int] = []
        for index, span in enumerate(spans):
            if span.kind is SpanKind.SERVER or schema.REQUEST_ID in (span.attributes or ()):
                request = span_of(span.readable())
                self._requests[request.span_id] = request
                is_slow = span.end_ns - span.start_ns >= self._slow_ns
                if is_slow and request.is_server and span.start_ns >= self._complete_since:
                    slow.append(index)
            elif span.name in _READ:
                self._hold(span)
        began = time.monotonic()
        if not slow or began < self._pause_until:
            return
        slow = sorted(slow, key=lambda index: spans[index].start_ns - spans[index].end_ns)[:_AT_ONCE]
        since = min(spans[index].start_ns for index in slow) - _BEFORE_NS
        requests = [each for each in self._requests.values() if each.end_ns >= since]
        causes = Causes([*requests, *(held.span for held in self._held if held.end_ns >= since)])
        ids = {one: str(each.attributes.get(schema.REQUEST_ID, "")) for one, each in causes.by_id.items()}
        for index in slow:
            request = span_of(spans[index].readable())
            if causes.has_steps(request):
                found = _attributes_of(causes.explain(request), ids)
                spans[index] = spans[index].with_attributes(found)
        self._pause_until = time.monotonic() + (time.monotonic() - began) * (1 / _SHARE - 1)

    def _hold(self, span: CollectedSpan) -> None:
        held = _Held(span)
        self._held.append(held)
        root = span.root if isinstance(span.root, Root) else None
        while root is not None and root.begin and f"{root.span_id:016x}" not in self._requests:
            self._requests[f"{root.span_id:016x}"] = _under_way(root, root.begin, held.span)
            root = root.group
        if len(self._held) > self._most:
            self._complete_since = max(self._complete_since, self._held.popleft().end_ns)


def _under_way(root: Root, begin: RequestBegin, child: Span) -> Span:
    """Return a request, or one of its answers, whose end is not known yet."""
    attributes = {schema.REQUEST_ID: begin.request_id, **begin.attributes}
    span = replace(child, name=begin.name, is_server=root.group is None, attributes=attributes, links=())
    span = replace(span, span_id=f"{root.span_id:016x}", parent_id=f"{begin.parent_id:016x}")
    return replace(span, start_ns=begin.start_ns, end_ns=1 << 63)


def _attributes_of(found: Explanation, ids: dict[str, str]) -> dict[str, float | list[str]]:
    """Return seconds by cause, and the ids of the requests that delayed it most, the worst first."""
    shares: dict[str, float] = {}
    for culprits in found.culprits.values():
        for span_id, seconds in culprits.items():
            shares[span_id] = shares.get(span_id, 0.0) + seconds
    attributes: dict[str, float | list[str]] = {
        schema.CAUSE_PREFIX + cause.name.lower(): seconds for cause, seconds in found.ranked()
    }
    if shares:
        worst = sorted(shares, key=lambda span_id: -shares[span_id])[:_CULPRITS]
        attributes[schema.CULPRITS] = [ids[span_id] for span_id in worst]
    return attributes
