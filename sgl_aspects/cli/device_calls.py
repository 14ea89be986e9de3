"""``sgl-aspects doctor --platform NAME -- COMMAND``: an engine's calls that are still written for CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from sgl_aspects import bootstrap, env
from sgl_aspects.cli.run import program_of
from sgl_aspects.engines.device_calls import CALLS_VARIABLE, REPORT_VARIABLE, DeviceCall, read_reports
from sgl_aspects.platforms.discovery import PLATFORM_VARIABLE, require_known


def run(platform: str | None, words: Sequence[str], *, as_json: bool) -> int:
    """Run the command on the platform until it ends, or Ctrl-C; then show each call that was reached.

    Exit status: the command's if it failed; otherwise 0.
    """
    command, program = program_of(words, "doctor --platform cpu")
    if platform is not None:
        require_known(platform)
    with tempfile.TemporaryDirectory(prefix="sgl-aspects-device-calls-") as folder:
        environment = env.shortened(bootstrap.prepared(os.environ))
        environment[REPORT_VARIABLE.removeprefix("SGL_")] = folder
        if platform is not None:
            environment[PLATFORM_VARIABLE] = platform
        engine = subprocess.Popen([program, *command[1:]], env=environment)
        while True:
            try:
                status = engine.wait()
                break
            except KeyboardInterrupt:  # the command got the signal too: wait for its end
                continue
        calls = list(read_reports(Path(folder)))
    if as_json:
        print(json.dumps([asdict(call) for call in calls], indent=2))
    else:
        print("\n".join(lines_of(calls, platform)))
    return status


def lines_of(calls: Iterable[DeviceCall], platform: str | None) -> list[str]:
    """Return a paragraph for each call: its implementation, and where it is called from."""
    by_call: dict[str, dict[str, DeviceCall]] = defaultdict(dict)
    processes = set()
    for each in calls:
        by_call[each.call][each.caller] = each
        processes.add(each.process_id)
    count = sum(map(len, by_call.values()))
    where = f" on platform {platform!r}" if platform else ""
    lines = [f"{len(by_call)} calls for CUDA were reached{where}: {count} places, {len(processes)} processes"]
    for call, places in sorted(by_call.items(), key=lambda item: (-len(item[1]), item[0])):
        lines += [
            "",
            f"{call}: {_answer(list(places.values()))}",
            *(f"  {caller}" for caller in sorted(places)),
        ]
    return lines


def _answer(places: Sequence[DeviceCall]) -> str:
    if all(each.answered_by == "platform" for each in places):
        return "answered by the platform"
    if places[0].answerable:
        return f"{CALLS_VARIABLE}=platform passes it to the platform, if that implements it"
    return "no platform method corresponds to it"
