"""``sgl-aspects doctor``: problems of hooks and how to solve them; calls that are still for CUDA."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from sgl_aspects.cli.hooks import add_source, called, reports, sorted_hooks
from sgl_aspects.run.process_reports import ProcessReport
from sgl_aspects.terminal import counted, printable
from sgl_aspects.tracing.record import native
from sgl_aspects.weaving import HookReport, State


@dataclass(frozen=True)
class Finding:
    """A problem.

    :param severity: "error" for a hook that cannot work, "warning" for one that may not.
    """

    severity: str
    what: str
    why: str
    advice: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    parser.add_argument(
        "--engine",
        nargs="+",
        metavar="WHEEL",
        help="instead: which roles of the built-in aspects these wheels (or folders) of an engine have",
    )
    parser.add_argument(
        "--platform", metavar="NAME", help="for the command after --: the platform that it runs on"
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="instead: run an engine, and name each call of torch.cuda that it reaches, with the caller",
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 if a hook cannot work."""
    if arguments.engine:
        from sgl_aspects.cli import engine_roles

        return engine_roles.show(arguments.engine, as_json=arguments.json)
    if arguments.command or arguments.platform is not None:
        from sgl_aspects.cli import device_calls

        return device_calls.run(arguments.platform, arguments.command, as_json=arguments.json)
    processes = list(reports(arguments.folder))
    findings = list(diagnose(processes))
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        own, ours, absent = sorted_hooks(hook for process in processes for hook in process.report.hooks)
        hooks = counted(len({(hook.target, hook.hook) for hook in own}), "hook")
        print(f"{hooks} in {counted(len(processes), 'process')}, {counted(len(findings), 'finding')}")
        print(called(ours))
        if absent:
            print(absent)
        print(f"compiled step path: {native.state()}")
        for finding in findings:
            text = f"\n{finding.severity}: {finding.what}\n  {finding.why}\n  -> {finding.advice}"
            print(printable(text))
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def diagnose(processes: Iterable[ProcessReport]) -> Iterator[Finding]:
    """Combine the reports of a run: a hook that is idle in one process may be busy in another.

    Of the tracing's own hooks only those that failed: an engine's version or use may have no place for one.
    """
    processes = list(processes)
    failed = [pair for process in processes for pair in process.failed_plugins.items()]
    for name, why in dict.fromkeys(failed):
        count = counted(failed.count((name, why)), "process")
        yield Finding("error", f"plugin {name} failed in {count}", why, "correct it: its hooks are missing")
    own, ours, _ = sorted_hooks(hook for process in processes for hook in process.report.hooks)
    hooks: dict[tuple[str, str], list[HookReport]] = {}
    for hook in own + [each for each in ours if each.errors or each.state is State.FAILED]:
        hooks.setdefault((hook.target, hook.hook), []).append(hook)
    for (target, name), found in hooks.items():
        yield from _diagnose_hook(f"{name} on {target}", found)
    for process in processes:
        for stale in process.report.stale:
            yield Finding(
                "warning",
                f"{stale.target} is still held by {stale.holder} in process {process.process_id}",
                "calls through that reference are not hooked",
                "register the hook before the reference is made: in a plugin, or under sgl-aspects run",
            )
        for place in process.report.displaced:
            yield Finding(
                "warning",
                f"another package's patch covers {place} in process {process.process_id}",
                "whether the hooks still run depends on whether that patch calls what it replaced",
                "hook the place through sgl-aspects instead, or remove the other patch",
            )


def _diagnose_hook(what: str, found: list[HookReport]) -> Iterator[Finding]:
    states = {hook.state for hook in found}
    details = "; ".join(dict.fromkeys(hook.detail for hook in found if hook.detail))
    errors = sum(hook.errors for hook in found)
    if errors:
        yield Finding(
            "warning", what, f"the observer raised {errors} times; the calls went on", "fix it: see the log"
        )
    if State.WOVEN in states:
        if not any(hook.calls or not hook.is_counted for hook in found):
            yield Finding(
                "warning",
                what,
                "woven, and never called in any process",
                "the engine may not use it, may replay it in a graph, or may hold a copy (see stale)",
            )
    elif State.FAILED in states:
        yield Finding("error", what, details, "use another hook type, or name what can be hooked")
    elif State.MISSING in states:
        yield Finding("error", what, details, "correct the target, or give alternates: 'old:name | new:name'")
    elif State.PENDING in states:
        yield Finding(
            "warning",
            what,
            details or "its module was not loaded in any process",
            "check the module's name, and that this part of the engine is used",
        )
