"""``sgl-aspects detach PID``: detach from an engine that another command attached to."""

from __future__ import annotations

import argparse

from sgl_aspects.attach.delegation import owner_to_become, run_as
from sgl_aspects.attach.operation import Run, run_of
from sgl_aspects.attach.process_tree import engine_tree, read_process
from sgl_aspects.cli.attach import show_detached
from sgl_aspects.errors import AttachError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pid", type=int, metavar="PID", help="any process of the engine")


def run(arguments: argparse.Namespace) -> int:
    """Remove every hook; the collector then sends what it has, and ends."""
    if read_process(arguments.pid) is not None:
        processes = engine_tree(arguments.pid, is_wanted=True)
        if (owner := owner_to_become(processes)) is not None:
            return run_as(owner, "sgl_aspects.cli.as_owner", ["detach", str(arguments.pid)], processes)
    folder = run_of(arguments.pid)
    if folder is None:
        raise AttachError(
            f"process {arguments.pid} is not attached to; attach with: sgl-aspects attach {arguments.pid}"
        )
    return show_detached(Run(folder).detach())
