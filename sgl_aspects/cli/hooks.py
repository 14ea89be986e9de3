"""``sgl-aspects hooks``: every hook, its target and its calls."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from sgl_aspects.run.process_reports import ProcessReport, read_all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every command that shows reports."""
    parser.add_argument(
        "--from",
        dest="folder",
        metavar="FOLDER",
        help="reports that `sgl-aspects run --report FOLDER` made; left out: the plugins installed here",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, one object a process")


def run(arguments: argparse.Namespace) -> int:
    processes = list(reports(arguments.folder))
    if arguments.json:
        print(json.dumps([process.as_dict() for process in processes], default=str, indent=2))
        return 0
    for process in processes:
        state = "" if process.ended else "  (killed: the state of its latest report)"
        print(f"process {process.process_id}{state}  {process.command}")
        for line in str(process.report).splitlines():
            print(f"  {line}")
    return 0


def reports(folder: str | None) -> Iterable[ProcessReport]:
    """Return the reports in ``folder``, or one of this process with the installed plugins loaded."""
    if folder is not None:
        return read_all(folder)
    import os
    import sys

    from sgl_aspects.plugins import load_plugins
    from sgl_aspects.weaving import report

    load_plugins()
    return [ProcessReport(os.getpid(), " ".join(sys.orig_argv), True, report())]
