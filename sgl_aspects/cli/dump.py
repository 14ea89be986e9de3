"""``sgl-aspects dump``: the last seconds of a live or dead process."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from sgl_aspects.cli.arguments import number, write_text
from sgl_aspects.cli.control import add_run_choice
from sgl_aspects.tracing.collect.rings import rings

_FORMATS = ("text", "otlp-json", "perfetto")


_seconds = number(float, 0, math.inf, "a number of seconds, such as 10")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--last", type=_seconds, default=10.0, metavar="SECONDS", help="seconds to go back (10)"
    )
    parser.add_argument("--format", choices=_FORMATS, default="text", help="perfetto: for ui.perfetto.dev")
    parser.add_argument("--output", type=Path, metavar="FILE", help="left out: standard output")
    add_run_choice(parser)


def run(arguments: argparse.Namespace) -> int:
    from sgl_aspects.tracing.collect import dump

    found = list(rings(arguments.folder, arguments.pid))
    spans = dump.spans_of(found, arguments.last)
    text = dump.write(spans, arguments.format, dump.request_ids(found))
    for ring in found:
        ring.close()
    if arguments.output is None:
        print(text, end="")
    else:
        write_text(arguments.output, text)
    return 0
