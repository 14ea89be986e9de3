"""``sgl-aspects run -- COMMAND``: run any Python program with hooks and tracing in all its processes."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from sgl_aspects import bootstrap, config, env
from sgl_aspects.cli.arguments import naming_flags
from sgl_aspects.errors import ConfigError
from sgl_aspects.run import prepared, process_reports
from sgl_aspects.run.cleaning import clean_up
from sgl_aspects.terminal import say

if TYPE_CHECKING:
    from sgl_aspects.tracing.settings import TraceSettings

_TRACE = "ASPECTS_TRACE"
# Requests alone: steps, each with a trace of its own, would flood a backend's list. `control` adds them.
_LEVEL = "1"
#: The flag that sets each variable.
_FLAGS = {
    "SGL_ASPECTS_TRACE": "level",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "endpoint",
    "SGL_ASPECTS_TRACE_FILE": "file",
    "OTEL_EXPORTER_PROMETHEUS_PORT": "prometheus",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "sgl-aspects run [options] -- COMMAND [ARGUMENT ...]"
    add_trace_arguments(parser, _LEVEL)
    parser.add_argument("--report", metavar="FOLDER", help="where each process writes a report of its hooks")
    parser.add_argument("--summary", action="store_true", help="print the number of delivered and lost spans")
    parser.add_argument(
        "--dormant", action="store_true", help="trace nothing, but allow sgl-aspects attach without ptrace"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")


def add_trace_arguments(parser: argparse.ArgumentParser, level: str) -> None:
    """Add the flags for what is traced, by default at ``level``, and the exporters of a new run."""
    levels = "0 off, 1 request, 2 + scheduler, 3 + forward, 4 + layers"
    parser.add_argument("--level", help=f"trace level: {levels} (default: {level})")
    parser.add_argument("--endpoint", metavar="URL", help="OTLP endpoint, such as http://localhost:4318")
    parser.add_argument("--file", metavar="PATH", help="write the traces to this OTLP-JSON file")
    parser.add_argument(
        "--prometheus", type=int, metavar="PORT", help="serve metrics for Prometheus at this port of loopback"
    )
    parser.add_argument("--config", metavar="FILE", help="hooks and traced functions, declared in TOML")


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by the command; returns only if that fails."""
    command, program = program_of(arguments.command, "sgl-aspects run")
    _warn_of_isolation(command)
    environment = env.shortened(bootstrap.prepared(os.environ))
    clean_up()
    if arguments.dormant:
        return _become(program, command, {**environment, prepared.SWITCH: "1"})
    settings = trace_settings(environment, arguments, _LEVEL)
    environment = dict(settings.environment)
    _begin_file(settings, environment)
    if arguments.config:
        config.read(arguments.config)  # its errors are reported here, in one line
        environment[env.spelled(config.VARIABLE, environment)] = _absolute(arguments.config)
    if arguments.report:
        environment[env.spelled(process_reports.VARIABLE, environment)] = _made(_absolute(arguments.report))
    if arguments.summary:
        environment["ASPECTS_TRACE_SUMMARY"] = "1"
    with contextlib.suppress(OSError):  # on a full disk the program runs, too
        print(end="", flush=True)  # also without a standard output
    _announce(settings)
    return _become(program, command, environment)


def _warn_of_isolation(command: Sequence[str]) -> None:
    """Name options of Python with which it does not import this package's ``sitecustomize``."""
    if "python" not in os.path.basename(command[0]):
        return
    for word in command[1:]:
        if not word.startswith("-"):
            return
        if not word.startswith("--") and (found := set("EIS") & set(re.split("[cmWX]", word)[0])):
            say(
                f"sgl-aspects: warning: with Python's option -{min(found)} the program runs without hooks "
                "and tracing"
            )
            return
        if re.match("-[A-Za-z]*[cm]", word):
            return


def _begin_file(settings: TraceSettings, environment: dict[str, str]) -> None:
    """Truncate the trace files, to which every program that the command starts will append."""
    from sgl_aspects.tracing.export.shared_file import SharedFile
    from sgl_aspects.tracing.settings import BEGUN

    if settings.level:
        written = [path for _, path in settings.files().values()]
        for path in written:
            if path not in settings.begun:
                try:
                    SharedFile(path).close()
                except OSError as error:
                    raise ConfigError(f"{path}: {error.strerror}") from error
        environment[env.spelled(BEGUN, environment)] = "\n".join(written)


def _announce(settings: TraceSettings) -> None:
    """Say on standard error what is traced, and where it goes."""
    from sgl_aspects.tracing.variables import refuses_connections

    with env.reading_from(settings.environment):
        if settings.level and settings.recorder == "ring":
            what = " ".join(("requests", "+ scheduler", "+ forward", "+ layers")[: settings.level])
            places = settings.destinations()
            if "otlp" in settings.exporters and refuses_connections(places[0]):
                places[0] += " (nothing listens there yet; for hooks alone: --level 0)"
            where = ", ".join(places) or "no exporter"
            say(f"sgl-aspects: tracing {what} (--level {settings.level}) to {where}")


def program_of(words: Sequence[str], by: str) -> tuple[list[str], str]:
    """Return the command after ``--`` in the words that follow ``by``, and the path of its program."""
    command = list(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise ConfigError(f"nothing to run: write the command after --, as in {by} -- python app.py")
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(f"{command[0]!r} is not a program that can be found; check its name and PATH")
    return command, program


def _become(program: str, command: list[str], environment: Mapping[str, str]) -> NoReturn:
    try:
        os.execve(program, command, environment)
    except OSError as error:
        raise ConfigError(
            f"{program} cannot be run: {error.strerror}; a script needs a first line such as #!/bin/sh "
            "that names an interpreter on this machine"
        ) from error


def _absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: the current folder was removed; name an absolute path") from error


def _made(folder: str) -> str:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--report {folder}: {error.strerror}; name a folder that can be written"
        ) from error
    return folder


def trace_settings(given: Mapping[str, str], arguments: argparse.Namespace, level: str) -> TraceSettings:
    """Return the settings of a new run, from the flags of :func:`add_trace_arguments`, checked."""
    for flag in ("level", "endpoint", "file", "config"):
        if getattr(arguments, flag, None) == "":  # typically an unset variable of a script
            raise ConfigError(f"--{flag} is empty: give it a value, or leave it out")
    # A wrong setting is reported here, in one line, and not by each process of the program.
    from sgl_aspects.tracing.settings import TraceSettings

    environment = env.shortened(given)
    perfetto = env.spelled("SGL_ASPECTS_TRACE_PERFETTO_FILE", environment)
    with contextlib.suppress(ConfigError):  # of a removed folder; seldom used
        environment[perfetto] = _absolute(environment.get(perfetto) or "trace.json")
    typed = {name: f"--{flag}" for name, flag in _FLAGS.items() if getattr(arguments, flag) is not None}
    with naming_flags(typed):
        return TraceSettings.chosen(
            environment,
            level=arguments.level or environment.get(_TRACE) or level,
            endpoint=arguments.endpoint,
            file=arguments.file and _absolute(arguments.file),
            prometheus=arguments.prometheus,
        )
