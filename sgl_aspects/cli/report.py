"""``sgl-aspects report``: a run as one page to look at in a browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from sgl_aspects.cli.arguments import writable_file
from sgl_aspects.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="?",
        metavar="RUN",
        help="a file of the otlp-json-file exporter, or a run's folder, live or dead (the only run there is)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=writable_file,
        default=Path("report.html"),
        metavar="FILE",
        help="the page (report.html)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Reads the run, writes the page, and says what is in it."""
    from sgl_aspects.view.page import page_of
    from sgl_aspects.view.sources import load_run

    found = load_run(arguments.source)
    if not found.spans:
        raise ConfigError(
            f"{found.source} holds no spans: has the engine served a request since tracing began?"
        )
    text = page_of(found)
    try:
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{arguments.output}: {error.strerror}") from error
    requests = sum(span.is_server for span in found.spans)
    print(
        f"{arguments.output}: {requests} requests, {len(found.spans)} spans, {len(text) / 1e6:.1f} MB. "
        "Open it in a browser."
    )
    return 0
