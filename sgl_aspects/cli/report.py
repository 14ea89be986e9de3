"""``sgl-aspects report``: a run as one page for a browser."""

from __future__ import annotations

import argparse
import json
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_aspects.cli.arguments import add_runs, share, writable_file, write_text
from sgl_aspects.errors import ConfigError
from sgl_aspects.terminal import counted, printable

if TYPE_CHECKING:
    from sgl_aspects.analysis.sources import Run

# Each with the default of its output file.
_FORMATS = {"page": "report.html", "perfetto": "timeline.json"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser)
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
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="instead: what takes longer in B than in A, runs of the same load: files, or folders of files",
    )
    parser.add_argument(
        "--beyond",
        type=share,
        default=0.02,
        metavar="SHARE",
        help="exit status 1 where a measure of B takes so much longer (0.02)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Read the run, write the page, and print a summary."""
    from sgl_aspects.cli import comparison
    from sgl_aspects.view.page import page_of

    output = arguments.output or Path(_FORMATS[arguments.format])
    if arguments.compare:
        others = arguments.sources + (["--format perfetto"] if arguments.format == "perfetto" else [])
        if others:
            raise ConfigError(f"--compare A B makes a page of two runs: leave out {' '.join(others)}")
        return _compare(arguments.compare, output, arguments.beyond, arguments.open)
    found = comparison.load(*arguments.sources)
    text = page_of(found) if arguments.format == "page" else _timeline(found)
    write_text(output, text)
    requests = counted(sum(span.is_server for span in found.spans), "request")
    size = f"{len(text) / 1e6:.1f} MB"
    print(f"{output}: {requests}, {counted(len(found.spans), 'span')}, {size}.", end=" ")
    if arguments.format == "page":
        _offer(output, arguments.open)
    else:
        print("Open it in ui.perfetto.dev.")
    for clock in found.clocks:
        print(printable(f"clock of {clock}"))
    return 0


def _compare(sources: Sequence[str], output: Path, beyond: float, opens: bool) -> int:
    from sgl_aspects.cli import comparison
    from sgl_aspects.view.page import page_of_both

    before, after = map(comparison.load_one, sources)
    changes = comparison.changes_of(before, after)
    write_text(output, page_of_both(before, after, comparison.rows_of(changes)))
    status = comparison.show(before, after, changes, beyond)
    print(f"{output}: both runs, and this table.", end=" ")
    _offer(output, opens)
    return status


def _offer(page: Path, opens: bool) -> None:
    """Print a link to the page, and open it if that is wanted."""
    link = page.absolute().as_uri()
    print(f"Open it in a browser: {link}")
    if opens:
        webbrowser.open(link)


def _timeline(run: Run) -> str:
    from sgl_aspects.analysis.spans import readable_of
    from sgl_aspects.tracing.export.chrome_trace import Timeline

    timeline = Timeline(names_hosts=len({span.host for span in run.spans}) > 1)
    return json.dumps({"traceEvents": list(timeline.events_of(map(readable_of, run.spans)))}) + "\n"
