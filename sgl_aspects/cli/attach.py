"""``sgl-aspects attach PID``: trace all processes of a running engine, and detach again."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import time
from collections.abc import Sequence

from sgl_aspects import config, env
from sgl_aspects.attach.debugging import connection
from sgl_aspects.attach.delegation import owner_to_become, run_as
from sgl_aspects.attach.operation import Answer, Run
from sgl_aspects.attach.process_tree import Process, engine_tree, read_process
from sgl_aspects.attach.rights import check
from sgl_aspects.cli.run import add_trace_arguments, trace_settings
from sgl_aspects.errors import AttachError, ConfigError
from sgl_aspects.run.collector import CollectorProcess
from sgl_aspects.run.requests import prepared_process
from sgl_aspects.tracing.collect.summary import TraceSummary
from sgl_aspects.tracing.settings import TraceSettings

_LEVEL = "3"
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
# Seconds that a collector needs beyond its flush, beside an engine that is still at work.
_COLLECTOR_SECONDS = 60.0
_LOOK_SECONDS = 0.2
_SHOWN = 8
# The process gets the variables that control recording; where to export is up to the collector.
_RECORDING = re.compile(r"(ASPECTS_TRACE|OTEL_(?!EXPORTER))")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text}: write a time such as 60s, 5m or 1h")
    return float(match[1]) * _UNITS[match[2]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pid", type=int, metavar="PID", help="any process of the engine")
    add_trace_arguments(parser, _LEVEL)
    parser.add_argument(
        "--for", dest="seconds", type=_seconds, metavar="TIME", help="detach after this time: 60s, 5m, 1h"
    )
    parser.add_argument("--force", action="store_true", help="also if it is not known to be an engine")
    parser.add_argument("--dry-run", action="store_true", help="show what would be done, and touch nothing")


def run(arguments: argparse.Namespace) -> int:
    """Attach, wait for the end of the time, Ctrl-C or `sgl-aspects detach`, and detach.

    Root's command for another user's process does it as that user.
    """
    processes = engine_tree(arguments.pid, is_wanted=arguments.force or bool(arguments.config))
    if (owner := owner_to_become(processes)) is None:
        return _run(arguments, processes)
    for process in processes:
        check(process.id, needs_ptrace=prepared_process(process.id, owner.user) is None)
    return run_as(owner, "sgl_aspects.cli.as_owner", _words(arguments), processes)


def _words(arguments: argparse.Namespace) -> list[str]:
    """Return the command line for the same from another folder."""
    words = ["attach", str(arguments.pid)]
    values = {
        "level": arguments.level,
        "endpoint": arguments.endpoint,
        "prometheus": arguments.prometheus,
        "for": arguments.seconds,
        "file": arguments.file and os.path.abspath(arguments.file),
        "config": arguments.config and os.path.abspath(arguments.config),
    }
    words += [f"--{flag}={value}" for flag, value in values.items() if value is not None]
    chosen = {"--force": arguments.force, "--dry-run": arguments.dry_run}
    return words + [flag for flag, is_chosen in chosen.items() if is_chosen]


def _run(arguments: argparse.Namespace, processes: Sequence[Process]) -> int:
    # The running engine may leave the collector little processor time for its last spans.
    environment = {"ASPECTS_TRACE_FLUSH_SECONDS": "10", **env.shortened(os.environ)}
    settings = trace_settings(environment, arguments, _LEVEL)
    if not settings.level:
        why = "the environment disables tracing" if settings.disabled else "at level 0 nothing is recorded"
        raise ConfigError(
            f"{why}: choose --level 1 to 4. sgl-aspects detach {arguments.pid} takes the hooks out again, "
            "sgl-aspects control --off stops recording"
        )
    if arguments.config:
        config.read(arguments.config)  # its errors are reported here, in one line
    for process in processes:
        is_prepared = prepared_process(process.id, os.geteuid()) is not None
        check(process.id, needs_ptrace=not is_prepared, has_capability=connection() is not None)
    if arguments.dry_run:
        for process in processes:
            way = "through its control block" if prepared_process(process.id, os.geteuid()) else "with ptrace"
            print(
                f"process {process.id}  {process.title}: would be attached to {way}, level {settings.level}"
            )
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return _attach(processes, settings, arguments)


def _attach(
    processes: Sequence[Process],
    settings: TraceSettings,
    arguments: argparse.Namespace,
) -> int:
    run = Run.make()
    collector: CollectorProcess | None = None
    try:
        variables = {name: value for name, value in settings.environment.items() if _RECORDING.match(name)}
        variables["ASPECTS_TRACE_METRICS"] = str(int(bool(settings.metric_exporters)))
        if arguments.config:
            variables[config.VARIABLE] = str(run.folder / "attach" / "aspects.toml")
            shutil.copyfile(arguments.config, variables[config.VARIABLE])
        run.prepare(processes)
        problem = None
        for answer in run.attach(processes, variables):
            _show(answer)
            problem = problem or answer.error
            # After the first ring exists: a collector would take a run without rings for ended. Before that
            # ring is full.
            if collector is None and not answer.error:
                collector = CollectorProcess(
                    str(run.folder), settings.collector_environment(), settings.prints()
                )
        if collector is None:
            raise AttachError(f"nothing is attached to: {problem}")
        until = f"for {arguments.seconds:g} s" if arguments.seconds else "until Ctrl-C"
        print(f"tracing at level {settings.level} {until}; run folder {run.folder}", flush=True)
        _wait(collector, arguments.seconds)
        if collector.has_ended:
            print("its processes have ended, or another attach or detach was there", flush=True)
    except KeyboardInterrupt:
        print(flush=True)
    finally:
        answers = run.detach()
        if collector is None:
            run.discard()
        restored = show_detached(answers)
    left = [answer for answer in answers if answer.error and read_process(answer.process.id) is not None]
    if collector is not None and left and not collector.has_ended:
        print(f"the run goes on until they are detached from: sgl-aspects detach {arguments.pid}", flush=True)
        collector.abandon()
        return 1
    return _finish(collector, settings) or restored


def _wait(collector: CollectorProcess, seconds: float | None) -> None:
    """Wait until the time is over, or the run is: its processes have ended, or were detached from."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while not collector.has_ended and (deadline is None or time.monotonic() < deadline):
        time.sleep(_LOOK_SECONDS)


def _finish(collector: CollectorProcess | None, settings: TraceSettings) -> int:
    if collector is None:
        return 1
    collector.ask_to_end()
    report = collector.wait(settings.flush_seconds + _COLLECTOR_SECONDS)
    collector.abandon()
    if report is None:
        print("the collector has not ended yet")
        return 1
    summary = TraceSummary.from_json(report)
    if not (summary.has_losses or settings.prints_summary):  # otherwise the collector has printed it
        print(summary)
    return int(bool(summary.problem))


def _show(answer: Answer) -> None:
    process, values = answer.process, answer.values
    where = f"process {process.id}  {process.title}"
    if answer.error:
        print(f"{where}: NOT attached: {answer.error}", flush=True)
        return
    milliseconds = answer.stood * 1e3, values["longest_piece_seconds"] * 1e3
    print(
        f"{where}\n"
        f"  {len(values['woven'])} functions woven, {values['waiting']} hooks wait for modules\n"
        f"  main thread stopped {milliseconds[0]:.1f} ms; imports {values['import_seconds']:.2f} s, "
        f"weaving {values['seconds']:.2f} s, longest piece {milliseconds[1]:.0f} ms",
        flush=True,
    )
    for title, key in (("not woven", "not_woven"), ("keeps the original", "stale")):
        lines = values[key]
        for line in lines[:_SHOWN]:
            print(f"  {title}: {line}")
        if len(lines) > _SHOWN:
            print(f"  {title}: {len(lines) - _SHOWN} more")


def show_detached(answers: Sequence[Answer]) -> int:
    """Print what came of removing each process's hooks; return 1 if some are left, otherwise 0."""
    status = 0
    for answer in answers:
        if answer.error:
            text, lost = f"NOT detached: {answer.error}", [answer.error]
        else:
            text, lost = f"{answer.values['restored']} originals are back", answer.values["not_restored"]
            text += f"; NOT back, replaced by other code meanwhile: {', '.join(lost)}" if lost else ""
        print(f"process {answer.process.id}: {text}", flush=True)
        status |= bool(lost)
    return status
