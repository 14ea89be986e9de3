"""``sgl-aspects hooks``: every hook, its target and its calls; whether it fits other versions."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence

from sgl_aspects.run.process_reports import ProcessReport, failed_plugins, read_all
from sgl_aspects.terminal import counted, printable
from sgl_aspects.weaving import HookReport, State

_OURS = "sgl-aspects"


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
        state = "" if process.ended else "  (has not ended, or was killed: the state of its latest report)"
        print(printable(f"process {process.process_id}{state}  {process.command}"))
        own, ours, absent = sorted_hooks(process.report.hooks)
        shown = process.report._replace(hooks=tuple(own))
        lines = printable(str(shown)).splitlines() if any(shown) or not ours else []
        lines += [printable(f"plugin {name} failed: {why}") for name, why in process.failed_plugins.items()]
        for line in (*lines, *([called(ours)] if ours else []), *([absent] if absent else [])):
            print(f"  {line}")
    return 0


def sorted_hooks(hooks: Iterable[HookReport]) -> tuple[list[HookReport], list[HookReport], str]:
    """Return users' hooks, those of the tracing, and a line about those for engines that are not here."""
    own: list[HookReport] = []
    ours: dict[str, list[HookReport]] = {}
    for hook in hooks:
        if hook.source is not None and hook.source.dist_name == _OURS:
            ours.setdefault(_engine(hook), []).append(hook)
        else:
            own.append(hook)
    here = [name for name, found in ours.items() if any(hook.state is not State.PENDING for hook in found)]
    counts = Counter({name: len(found) for name, found in ours.items() if name not in here})
    counted = ", ".join(f"{name} ({count})" for name, count in counts.items())
    line = f"the tracing's hooks wait for engines that are not loaded here: {counted}" if counted else ""
    return own, [hook for name in here for hook in ours[name]], printable(line)


def called(ours: Sequence[HookReport]) -> str:
    """Return a line about the tracing's own hooks, which are many; ``--json`` has each."""
    called = {hook.target for hook in ours if hook.calls}
    return f"tracing: {counted(len({hook.target for hook in ours}), 'hook')}, {len(called)} called"


def _engine(hook: HookReport) -> str:
    """Return the package that the hook's target is in, the embedded engine's by its name."""
    package = hook.target.partition(":")[0].partition(".")[0]
    return "embedded" if package == "sgl_aspects" else package


def reports(folder: str | None) -> Iterable[ProcessReport]:
    """Return the reports in ``folder``, or one of this process with the installed plugins loaded."""
    if folder is not None:
        return read_all(folder)
    import os
    import sys

    from sgl_aspects.plugins import load_plugins
    from sgl_aspects.weaving import report

    load_plugins()
    return [ProcessReport(os.getpid(), " ".join(sys.orig_argv), True, report(), failed_plugins)]
