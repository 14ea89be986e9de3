"""One request as bars on a time line: its spans, and the scheduler's steps linked to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sgl_aspects.analysis.numbers import STEP, RunReport, report_phases
from sgl_aspects.analysis.spans import Span, children_of
from sgl_aspects.tracing import schema
from sgl_aspects.view.text import duration

_STYLES = {
    "tokenize": "cyan",
    "queue": "yellow",
    "prefill": "magenta",
    "mixed": "magenta",
    "decode": "green",
    "detokenize": "cyan",
}
_NARROWEST_BAR = 12


@dataclass(frozen=True)
class Row:
    """A line of the waterfall; times in nanoseconds, ``seconds`` if it is not their difference."""

    label: str
    kind: str
    start_ns: int
    end_ns: int
    note: str = ""
    seconds: float | None = None


def most_telling_request(report: RunReport, spans: Sequence[Span]) -> Span:
    """Return the most interesting request: prefilled in the most chunks, then the longest."""

    def score(span: Span) -> tuple[int, int]:
        chunks = sum(child.name == "prefill" for child in children_of(spans, span))
        return chunks, span.end_ns - span.start_ns

    return max((request.span for request in report.requests), key=score)


def rows_of(request: Span, spans: Sequence[Span]) -> tuple[list[Row], list[Row]]:
    """Return (the request's own spans, the steps linked to it by phase)."""
    children = children_of(spans, request)
    own = [_row(request, "request")]
    own += [_row(child, _branch(index, len(children)) + child.name) for index, child in enumerate(children)]
    phases = report_phases(spans, [s for s in spans if s.name == STEP and request.span_id in s.links])
    linked = [
        Row(
            label=f"{_branch(index, len(phases))}{len(phase.steps)} × {phase.phase}",
            kind=phase.phase,
            start_ns=min(step.start_ns for step in phase.steps),
            end_ns=max(step.end_ns for step in phase.steps),
            note=f"{duration(phase.step_seconds / len(phase.steps))} each, {phase.forward_share:.0%} forward",
            seconds=phase.step_seconds,
        )
        for index, phase in enumerate(phases)
    ]
    return own, linked


def print_waterfall(console: Console, request: Span, spans: Sequence[Span]) -> None:
    """Draw the bars on one scale, from the request's receipt to its end."""
    own, linked = rows_of(request, spans)
    label_width = max(len(row.label) for row in (*own, *linked))
    note_width = max(len(row.note) for row in (*own, *linked))
    bar_width = console.width - label_width - note_width - 16
    if bar_width < _NARROWEST_BAR:  # a narrow terminal: drop the notes
        note_width = 0
        bar_width = max(console.width - label_width - 14, _NARROWEST_BAR)
    console.print(Text(f"{request.name}   trace {request.trace_id}", style="bold"), no_wrap=True)
    console.print(_grid(own, request, label_width, bar_width, note_width))
    if linked:
        console.print(Text("scheduler steps that are linked to it", style="bold"))
        console.print(_grid(linked, request, label_width, bar_width, note_width))


def _grid(rows: Sequence[Row], request: Span, label_width: int, bar_width: int, note_width: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, width=label_width)
    table.add_column(no_wrap=True, width=bar_width)
    table.add_column(no_wrap=True, justify="right", width=8)
    if note_width:
        table.add_column(no_wrap=True, style="dim")
    for row in rows:
        style = _STYLES.get(row.kind, "")
        seconds = (row.end_ns - row.start_ns) / 1e9 if row.seconds is None else row.seconds
        bar = _bar(row.start_ns - request.start_ns, row.end_ns - request.start_ns, request, bar_width)
        cells = [Text(row.label, style=style), Text(bar, style=style), Text(duration(seconds))]
        table.add_row(*cells, Text(row.note)) if note_width else table.add_row(*cells)
    return table


def _row(span: Span, label: str) -> Row:
    notes = {
        "tokenize": (schema.INPUT_TOKENS, "tokens"),
        "prefill": (schema.PREFILL_TOKENS, "tokens"),
        "decode": (schema.OUTPUT_TOKENS, "tokens"),
    }
    note = ""
    if span.name in notes:
        attribute, unit = notes[span.name]
        note = f"{span.number(attribute):.0f} {unit}"
    elif schema.DETOKENIZE_BUSY_TIME in span.attributes:
        note = f"busy for {duration(span.number(schema.DETOKENIZE_BUSY_TIME))}"
    return Row(label, span.name, span.start_ns, span.end_ns, note)


def _branch(index: int, count: int) -> str:
    return "└─ " if index == count - 1 else "├─ "


def _bar(start_ns: int, end_ns: int, request: Span, width: int) -> str:
    """Draw blanks up to the start, then the bar, in half cells; a shorter one is a thin line.

    Parts outside the request are cut off.
    """
    scale = 2 * width / max(request.end_ns - request.start_ns, 1)
    start = min(max(round(start_ns * scale), 0), 2 * width - 1)
    end = min(max(round(end_ns * scale), start), 2 * width)
    cells = (
        [_CELLS[start <= 2 * cell < end, start <= 2 * cell + 1 < end] for cell in range((end + 1) // 2)]
        if end > start
        else [" "] * (start // 2) + ["▏"]
    )
    return "".join(cells)


_CELLS = {(False, False): " ", (True, True): "█", (True, False): "▌", (False, True): "▐"}
