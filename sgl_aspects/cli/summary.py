"""The table of a run, and the numbers of delivered and lost spans."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sgl_aspects.analysis.numbers import RunReport
from sgl_aspects.terminal import counted, table
from sgl_aspects.view.text import duration

if TYPE_CHECKING:
    from sgl_aspects.tracing import TraceSummary


def print_summary(console: Console, report: RunReport) -> None:
    """Print the speed of the run and the time of the scheduler's steps, from its spans."""
    console.print(_numbers(report))
    console.print()
    console.print(_steps(report))


def print_delivery(console: Console, summary: TraceSummary, file: Path, endpoint: str | None) -> None:
    """Print where the spans are, and how many did not arrive at the endpoint."""
    written = summary.exported.get("otlp-json-file", 0)
    if summary.problem:
        console.print(Text(f"Tracing: {summary.problem}", style="bold red"))
        return
    console.print(
        Text.assemble(f"{counted(written, 'span')} written to ", (str(file), "bold")), soft_wrap=True
    )
    lost = (
        summary.dropped + summary.unjoined + summary.damaged + summary.not_delivered.get("otlp-json-file", 0)
    )
    if lost:
        console.print(Text(f"{lost} spans were lost on the way to the file.", style="bold red"))
    if "otlp" not in summary.exported:
        return
    where = endpoint or "the OTLP endpoint"
    missing = summary.not_delivered["otlp"]
    if missing:
        text = f"{missing} of {summary.spans_recorded} spans were not delivered to {where}."
        console.print(Text(text, style="bold red"), soft_wrap=True)
        console.print("Is an OpenTelemetry collector listening there? The file has them all.")
    else:
        console.print(Text(f"{summary.exported['otlp']} spans delivered to {where}"), soft_wrap=True)


def _numbers(report: RunReport) -> Table:
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(no_wrap=True)
    rows.add_column(no_wrap=True, justify="right", style="bold")
    rows.add_column(style="dim")
    rows.add_row("output tokens/s", f"{report.output_tokens_per_second:.1f}", _totals(report))
    prompts = [request.prompt_tokens for request in report.requests]
    rows.add_row("prompt tokens", str(sum(prompts)), f"{min(prompts)} to {max(prompts)} a request")
    first = [request.time_to_first_token for request in report.requests]
    rows.add_row("time to first token", duration(statistics.fmean(first)), _spread(first))
    per_token = [r.time_per_output_token for r in report.requests if r.time_per_output_token is not None]
    if per_token:
        rows.add_row("time per output token", duration(statistics.fmean(per_token)), _spread(per_token))
    rows.add_row("share of time in forward", f"{report.forward_share:.1%}", "of the time in scheduler steps")
    return rows


def _totals(report: RunReport) -> str:
    requests = counted(len(report.requests), "request")
    return f"{report.output_tokens} tokens of {requests} in {duration(report.seconds)}"


def _spread(times: Sequence[float]) -> str:
    return f"mean; {duration(min(times))} to {duration(max(times))}"


def _steps(report: RunReport) -> Table:
    rows = table("steps by phase", "steps", "tokens/step", "time/step", "total", "forward")
    for phase in report.phases:
        count = len(phase.steps)
        rows.add_row(
            phase.phase,
            str(count),
            f"{phase.tokens / count:.1f}",
            duration(phase.step_seconds / count),
            duration(phase.step_seconds),
            f"{phase.forward_share:.1%}",
        )
    return rows
