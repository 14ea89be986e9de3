"""``sgl-aspects run -- COMMAND``: run any Python program with hooks and tracing in all its processes."""

from __future__ import annotations

import argparse
import os
import shutil

from sgl_aspects import bootstrap, config, env, process_reports
from sgl_aspects.errors import ConfigError

_TRACE, _RUN = "ASPECTS_TRACE", "ASPECTS_TRACE_RUN"
# Requests alone: steps, each a trace of its own, would fill a backend's list of traces. `ctl` adds them.
_LEVEL = "1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "sgl-aspects run [options] -- COMMAND [ARGUMENT ...]"
    parser.add_argument("--level", help="trace level: 0 off, 1 request (default), 2 + scheduler, 3 + forward")
    parser.add_argument("--endpoint", metavar="URL", help="OTLP endpoint, such as http://localhost:4318")
    parser.add_argument("--file", metavar="PATH", help="write the traces to this OTLP-JSON file")
    parser.add_argument(
        "--prometheus", type=int, metavar="PORT", help="serve metrics for Prometheus at this port of loopback"
    )
    parser.add_argument("--config", metavar="FILE", help="hooks and traced functions, declared in TOML")
    parser.add_argument("--report", metavar="FOLDER", help="each process writes there what its hooks did")
    parser.add_argument("--summary", action="store_true", help="say at the end what became of the spans")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="what to run")


def run(arguments: argparse.Namespace) -> int:
    """Replaces this process by the command; returns only where that fails."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise ConfigError(
            "nothing to run: write the command after --, as in sgl-aspects run -- python app.py"
        )
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(f"{command[0]!r} is no program that can be found; check its name and PATH")
    environment = env.shortened(bootstrap.prepared(os.environ))
    environment.pop(_RUN, None)  # a run of its own, even where a traced program asks for it
    environment[_TRACE] = arguments.level or environment.get(_TRACE) or _LEVEL
    if arguments.config:
        config.read(arguments.config)  # its faults are told here, in one line
        environment[env.spelled(config.VARIABLE, environment)] = os.path.abspath(arguments.config)
    if arguments.report:
        environment[env.spelled(process_reports.VARIABLE, environment)] = _made(
            os.path.abspath(arguments.report)
        )
    if arguments.summary:
        environment["ASPECTS_TRACE_SUMMARY"] = "1"
    _choose_exporters(environment, arguments)
    print(end="", flush=True)  # also where there is no standard output
    os.execve(program, command, environment)


def _made(folder: str) -> str:
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--report {folder}: {error.strerror}; name a folder that can be written"
        ) from error
    return folder


def _choose_exporters(environment: dict[str, str], arguments: argparse.Namespace) -> None:
    chosen = []
    if arguments.endpoint:
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = arguments.endpoint
        environment.pop("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", None)  # it would go first
        chosen.append("otlp")
    if arguments.file:
        environment["ASPECTS_TRACE_FILE"] = os.path.abspath(arguments.file)
        chosen.append("otlp-json-file")
    if chosen:
        environment["OTEL_TRACES_EXPORTER"] = ",".join(chosen)
    if arguments.prometheus is not None:
        environment["OTEL_EXPORTER_PROMETHEUS_PORT"] = str(arguments.prometheus)
        named = environment.get("OTEL_METRICS_EXPORTER")
        environment["OTEL_METRICS_EXPORTER"] = ",".join(filter(None, [named, "prometheus"]))
    # A wrong setting is told here, in one line, and not by each process of the program.
    from sgl_aspects.tracing.export.prometheus_port import require_port
    from sgl_aspects.tracing.settings import TraceSettings

    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        settings = TraceSettings.from_environment()
        if settings.level:
            require_port(settings.checked())
    finally:
        os.environ.clear()
        os.environ.update(before)
