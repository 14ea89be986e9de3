"""``sgl-aspects control``: change what a live run records; take a profile of its next steps."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path

from sgl_aspects import env
from sgl_aspects.cli import kernel_profile
from sgl_aspects.cli.arguments import positive_integer, share
from sgl_aspects.errors import ConfigError
from sgl_aspects.run.collector import collector_state, how_to_start
from sgl_aspects.run.control import Control, read_control, write_control, write_run_control
from sgl_aspects.run.fleet import opener
from sgl_aspects.terminal import printable
from sgl_aspects.tracing.collect.rings import rings
from sgl_aspects.tracing.variables import without_secrets

_LONGEST_ANSWER = 1 << 16
_MOST_STEPS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--level", type=int, choices=range(5), help="1 request, 2 + scheduler, 3 + forward, 4 + layers; 0 off"
    )
    parser.add_argument(
        "--sample", type=share, metavar="SHARE", help="share of the requests to record, 0 to 1"
    )
    switch = parser.add_mutually_exclusive_group()
    switch.add_argument("--on", dest="on", action="store_const", const=True, help="record again, as before")
    switch.add_argument("--off", dest="on", action="store_const", const=False, help="record nothing")
    add_run_choice(parser)
    profile = parser.add_argument_group("a profile of the device, instead")
    profile.add_argument(
        "--profile",
        type=positive_integer,
        metavar="STEPS",
        help=f"the kernels of the run's next STEPS forward passes, at most {_MOST_STEPS}, become spans",
    )
    profile.add_argument(
        "--server",
        metavar="URL",
        help="have the server there take its own, into a file (POST /start_profile)",
    )


def add_run_choice(
    parser: argparse.ArgumentParser, pid: str = "this process only; left out: every process of the run"
) -> None:
    """Add the flags of a live run; ``pid``: what the id of a process chooses."""
    parser.add_argument("--pid", type=int, help=pid)
    parser.add_argument(
        "--run",
        dest="folder",
        metavar="RUN",
        help="its folder, or a process of it; needed for one of several",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show what each process records, after making the requested changes."""
    if arguments.profile is not None:
        if arguments.server:
            return take_profile(arguments.server, arguments.profile)
        if arguments.profile > _MOST_STEPS:
            raise ConfigError(f"--profile {arguments.profile}: write a number from 1 to {_MOST_STEPS}")
        return kernel_profile.take(arguments.profile, arguments.folder, arguments.pid)
    if arguments.on and arguments.level == 0:
        raise ConfigError("--on and --level 0, which is off, contradict each other: leave one of them out")
    requested = {"level": arguments.level, "sample": arguments.sample, "on": arguments.on}
    changes = any(value is not None for value in requested.values())
    changed: dict[Path, Control] = {}
    folders: dict[Path, None] = {}
    for ring in rings(arguments.folder, arguments.pid):
        try:
            control = read_control(ring.path)
            if changes:
                control = control.changed(**requested)
                write_control(ring.path, control)
                changed[ring.path.parent] = control
        except FileNotFoundError:  # the run has ended meanwhile
            ring.close()
            continue
        except OSError as error:
            raise ConfigError(f"{ring.path}: {error.strerror}; only its own user can change a run") from error
        folders[ring.path.parent] = None
        alive = "" if ring.is_alive() else "  (ended)"
        level = f"level {control.level}" if control.level else f"off (level {control.wanted} when on)"
        print(f"process {ring.process_id}: {level}, sample {control.sample:g}{alive}")
        ring.close()
    for folder in folders:
        state = collector_state(folder)
        if state is not None:
            print(f"collector: {state}" + ("" if state.is_alive else f"; {how_to_start(folder)}"))
    if arguments.pid is None:
        for folder, control in changed.items():
            with contextlib.suppress(FileNotFoundError):
                write_run_control(folder, control)
    return 0


def take_profile(server: str, num_steps: int) -> int:
    """Request a profile from a server (the embedded engine or SGLang), and print its answer.

    ConfigError if there is no such server, or it refuses.
    """
    headers = {"content-type": "application/json"}
    key = env.text("SGL_ASPECTS_API_KEY")
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    url = f"{server.rstrip('/')}/start_profile"
    shown = without_secrets(url, [])
    try:
        request = urllib.request.Request(url, json.dumps({"num_steps": num_steps}).encode(), headers)
        with opener.open(request) as answer:  # a redirect would take the key to another server
            print(printable(answer.read(_LONGEST_ANSWER).decode(errors="replace").strip()))
    except urllib.error.HTTPError as error:
        reason = error.read(_LONGEST_ANSWER).decode(errors="replace")[:300]
        raise ConfigError(f"{shown} answers {error.code}: {reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ConfigError(
            f"{shown}: {error}; name a server that runs with --server http://HOST:PORT"
        ) from error
    return 0
