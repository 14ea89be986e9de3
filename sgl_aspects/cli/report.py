"""``sgl-aspects report``: a run as one page for a browser."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_aspects.cli.arguments import writable_file
from sgl_aspects.errors import ConfigError
from sgl_aspects.files import private
from sgl_aspects.terminal import counted

if TYPE_CHECKING:
    from sgl_aspects.analysis.sources import Run

# Each with the default of its output file.
_FORMATS = {"page": "report.html", "perfetto": "timeline.json"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="RUN",
        help="files of the otlp-json-file exporter, or runs' folders, live or dead, of one or several hosts "
        "(the only run there is)",
    )
    parser.add_argument(
        "--format", choices=_FORMATS, default="page", help="perfetto: a timeline for ui.perfetto.dev"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=writable_file,
        metavar="FILE",
        help="the page (report.html), or the timeline (timeline.json)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Read the run, write the page, and print a summary."""
    from sgl_aspects.analysis.sources import load_runs

    found = load_runs(arguments.sources)
    output = arguments.output or Path(_FORMATS[arguments.format])
    if not found.spans:
        raise ConfigError(
            f"{found.source} holds no spans: has the engine served a request since tracing began?"
        )
    text = _page(found) if arguments.format == "page" else _timeline(found)
    try:
        with open(output, "w", encoding="utf-8", opener=private) as page:
            page.write(text)
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror}") from error
    requests = counted(sum(span.is_server for span in found.spans), "request")
    where = "a browser" if arguments.format == "page" else "ui.perfetto.dev"
    size = f"{len(text) / 1e6:.1f} MB"
    print(f"{output}: {requests}, {counted(len(found.spans), 'span')}, {size}. Open it in {where}.")
    for clock in found.clocks:
        print(f"clock of {clock}")
    return 0


def _page(run: Run) -> str:
    from sgl_aspects.view.page import page_of

    return page_of(run)


def _timeline(run: Run) -> str:
    from sgl_aspects.analysis.spans import readable_of
    from sgl_aspects.tracing.export.chrome_trace import Timeline

    timeline = Timeline(names_hosts=len({span.host for span in run.spans}) > 1)
    return json.dumps({"traceEvents": list(timeline.events_of(map(readable_of, run.spans)))}) + "\n"
