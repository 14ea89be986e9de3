"""``sgl-aspects top``: a live run in the terminal, its levels switched by a key."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sgl_aspects.cli.arguments import positive_integer
from sgl_aspects.cli.control import add_run_choice
from sgl_aspects.errors import ConfigError
from sgl_aspects.terminal import counted
from sgl_aspects.tracing.collect.rings import rings

if TYPE_CHECKING:
    from sgl_aspects.view.live import LiveRun

# Seconds that `--once` collects before it shows the screen.
_ONCE_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_choice(parser, "the run of this process")
    parser.add_argument(
        "--window",
        type=positive_integer,
        default=60,
        metavar="SECONDS",
        help="seconds that are counted (the last 60)",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=0.5,
        metavar="SECONDS",
        help="seconds between two reads of the rings (0.5)",
    )
    parser.add_argument("--once", action="store_true", help="show the screen once, without a terminal")


def run(arguments: argparse.Namespace) -> int:
    """Run until the run ends or ``q`` is pressed; prints how many requests finished."""
    from sgl_aspects.view.live import LiveRun

    live = LiveRun(_folder(arguments), arguments.window)
    try:
        live.poll()
        if live.has_ended():
            raise ConfigError(
                f"every process of {live.folder} has ended: look at it with sgl-aspects report {live.folder}"
            )
        if arguments.once or not sys.stdout.isatty():
            _show_once(live)
            return 0
        from sgl_aspects.cli.top_app import TopApp

        TopApp(live, max(0.05, arguments.interval)).run()
        ended = "The run has ended. " if live.has_ended() else ""
        print(f"{ended}{counted(live.finished_requests, 'request')} finished.")
        return 0
    finally:
        live.close()


def _folder(arguments: argparse.Namespace) -> Path:
    found = list(rings(arguments.folder, arguments.pid))
    for ring in found:
        ring.close()
    if not found:
        raise ConfigError("none of the run's rings can be read")
    return found[0].path.parent


def _show_once(live: LiveRun) -> None:
    from rich.console import Console

    from sgl_aspects.view.top_screen import screen

    time.sleep(_ONCE_SECONDS)
    live.poll()
    size = shutil.get_terminal_size((100, 40))
    Console(highlight=False, width=size.columns).print(screen(live, live.controls(), size.columns, 40))
