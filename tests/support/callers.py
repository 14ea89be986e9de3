"""Callers of traced servers, and the traces under their ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tests.support.otlp_receiver import Receiver, Span

#: The caller's span id.
CALLER = "00f067aa0ba902b7"


def trace_id(number: int) -> str:
    return f"{number + 1:032x}"


def parent(number: int, **more: str) -> dict[str, str]:
    """Headers of the caller with this number."""
    return {"traceparent": f"00-{trace_id(number)}-{CALLER}-01", **more}


@dataclass
class Requests:
    """The spans of numbered requests, by trace."""

    receiver: Receiver
    traces: dict[str, list[Span]]

    def of(self, number: int) -> list[Span]:
        return sorted(self.traces[trace_id(number)], key=lambda span: span.start)

    def spans(self, number: int, name: str) -> list[Span]:
        return [span for span in self.of(number) if span.name == name]

    def root(self, number: int) -> Span:
        (root,) = [span for span in self.of(number) if span.parent_id == CALLER]
        return root


def by_trace(spans: Iterable[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.trace_id, []).append(span)
    return found


def one(spans: list[Span], name: str) -> Span:
    (span,) = [span for span in spans if span.name == name]
    return span


def orphans(traces: dict[str, list[Span]]) -> list[str]:
    """Names of spans whose parent is neither in their trace nor the caller."""
    return [
        span.name
        for spans in traces.values()
        for span in spans
        if span.parent_id not in {"", CALLER, *(each.span_id for each in spans)}
    ]
