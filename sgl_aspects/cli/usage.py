"""``sgl-aspects usage``: requests, tokens and device time by tenant, and the share that was in time."""

from __future__ import annotations

import argparse

from sgl_aspects.cli.arguments import add_runs, read_runs
from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing import schema

_SHORT = {"tenant": schema.TENANT, "model": schema.REQUEST_MODEL}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
    parser.add_argument(
        "--by", default="tenant", metavar="ATTRIBUTE", help="tenant, model, or an attribute of requests"
    )
    parser.add_argument("--ttft", type=float, metavar="SECONDS", help="target for the first token")
    parser.add_argument("--itl", type=float, metavar="SECONDS", help="target for the time between tokens")


def run(arguments: argparse.Namespace) -> int:
    """Print a row for each value of the attribute; their device time adds up to that of the steps."""
    from rich.markup import escape

    from sgl_aspects.analysis.causes import Causes
    from sgl_aspects.analysis.usage import usage_of
    from sgl_aspects.terminal import console, table
    from sgl_aspects.view.text import duration, one_line

    run = read_runs(arguments.sources)
    limits = [float("inf") if limit is None else limit for limit in (arguments.ttft, arguments.itl)]
    rows = usage_of(run.spans, _SHORT.get(arguments.by, arguments.by), *limits)
    if not rows:
        raise ConfigError(f"{run.source} holds no requests: has the engine served one since tracing began?")
    if arguments.by not in _SHORT and not any(row.name for row in rows):
        known = {name for request in Causes(run.spans).requests for name in request.attributes}
        choices = ", ".join([*_SHORT, *sorted(known)])
        raise ConfigError(f"--by {arguments.by}: no request has this attribute; choose from {choices}")
    total = sum(row.device_seconds for row in rows)
    headings = ("requests", "failed", "input", "output", "device time", "share", "in time")
    shown = table(escape(arguments.by), *headings)
    for row in rows:
        counts = (row.requests, row.failed, row.input_tokens, row.output_tokens)
        share = f"{row.device_seconds / total:.1%}" if total else "–"
        cells = (
            *(f"{count:,}" for count in counts),
            duration(row.device_seconds),
            share,
            "–" if row.goodput is None else f"{row.goodput:.1%}",
        )
        shown.add_row(escape(one_line(row.name or "none", 60)), *cells)
    console().print(shown)
    return 0
