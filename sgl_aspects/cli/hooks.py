"""``sgl-aspects hooks``: every hook, its target and its calls; whether it fits other versions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

from sgl_aspects.run.process_reports import ProcessReport, read_all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("show", "lock", "lint"),
        default="show",
        help="show the hooks; lock: write what their targets are in this version; lint: compare that "
        "with other versions, with exit status 1 if a hook needs its author",
    )
    parser.add_argument("--lock", default="hooks.lock", metavar="FILE", help="of lock and lint (hooks.lock)")
    parser.add_argument(
        "--against",
        nargs="+",
        default=[],
        metavar="WHEEL",
        help="of lint: wheels, or folders that hold a package",
    )
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
    """Exit status 1 if lint found a hook that needs its author."""
    if arguments.action != "show":
        from sgl_aspects.cli import hook_lock

        if arguments.action == "lint":
            return hook_lock.lint(arguments.lock, arguments.against, as_json=arguments.json)
        return hook_lock.lock(arguments.lock, reports(arguments.folder))
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
