"""``sgl-aspects preflight``: what this machine lacks for tracing, and what each lack costs."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass

from sgl_aspects.attach.ptrace import stopped
from sgl_aspects.attach.rights import has_trace_capability, may_trace
from sgl_aspects.cli.run import add_trace_arguments, trace_settings
from sgl_aspects.errors import AttachError, ConfigError
from sgl_aspects.terminal import printable
from sgl_aspects.tracing.record import native
from sgl_aspects.tracing.variables import unreachable

_RING = 8 << 20  # bytes of a process's ring
_PROCESSES = 16  # of an engine on one machine, generously
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_LEVEL = "1"


@dataclass(frozen=True)
class Check:
    """The result of one check.

    :param cost: what the lack costs and what helps; empty if nothing is lacking.
    """

    name: str
    found: str
    cost: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "What this machine lacks for tracing, and what each lack costs. Takes the options and variables of "
        "sgl-aspects run. Exit status 1 if something is lacking."
    )
    add_trace_arguments(parser, _LEVEL)


def run(arguments: argparse.Namespace) -> int:
    """Exit status 1 if something is lacking."""
    results = [_settings_check(arguments), *(check() for check in CHECKS)]
    width = max(len(check.name) for check in results)
    for check in results:
        print(f"{'lack' if check.cost else 'ok':4}  {check.name:{width}}  {printable(check.found)}")
        if check.cost:
            print(f"{'':{width + 8}}{printable(check.cost)}")
    return 1 if any(check.cost for check in results) else 0


def _settings_check(arguments: argparse.Namespace) -> Check:
    """Check exporters and their packages, the port for Prometheus, and the backend."""
    try:
        settings = trace_settings(os.environ, arguments, _LEVEL)
    except ConfigError as error:
        return Check("backend", "a setting cannot work", str(error))
    if "otlp" not in settings.exporters:
        return Check("backend", f"none; exporters: {', '.join(settings.exporters) or 'none'}")
    found = f"{settings.otlp_endpoint()} over {settings.protocol}"
    problem = unreachable(settings.otlp_endpoint())
    if problem is None:
        return Check("backend", found)
    return Check(
        "backend",
        f"{found} cannot be reached: {problem.strerror or problem}",
        "spans are kept for a while, then lost and counted: name one with --endpoint, or use --file",
    )


def _step_path() -> Check:
    if native.compiled is not None:
        return Check("compiled step path", native.state())
    return Check("compiled step path", native.state(), "a decode step costs 40 to 60 µs more from level 2 on")


def _shared_memory() -> Check:
    try:
        system = os.statvfs("/dev/shm")
    except OSError as error:
        return Check("shared memory", f"/dev/shm: {error.strerror}", "records go to a folder on a disk")
    free = system.f_bavail * system.f_frsize
    found = f"{free / 2**20:,.0f} MiB of /dev/shm are free"
    if free >= _RING * _PROCESSES:
        return Check("shared memory", found)
    return Check(
        "shared memory",
        found,
        f"room for {free // _RING} processes' rings, the others record on a disk: docker run --shm-size 2g, "
        "or an emptyDir with medium: Memory",
    )


def _limits() -> Check:
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"files of {'any size' if size < 0 else f'{size >> 20} MiB'}, {files:,} open"
    if 0 <= size < _RING:
        return Check(
            "limits", found, "a process's ring is smaller, so bursts of spans are lost: ulimit -f unlimited"
        )
    return Check("limits", found)


def _attaching() -> Check:
    obstacle = may_trace() or _refused()
    if obstacle is not None:
        return Check(
            "attach",
            obstacle,
            "sgl-aspects attach needs sudo, in a container docker run --cap-add SYS_PTRACE, or engines that "
            "were started with sgl-aspects run --dormant",
        )
    whose = "this user that have no more capabilities"
    if has_trace_capability():
        whose = "every user" if os.geteuid() == 0 else "this user"
    return Check("attach", f"to running programs of {whose}")


def _refused() -> str | None:
    """Stop a child of this process, and return why that is refused; None if it is not."""
    reading, held = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(held)
            os.read(reading, 1)  # until this process has ended, however it did
        finally:
            os._exit(0)
    try:
        with stopped(child):
            return None
    except (OSError, AttachError) as error:
        return f"the kernel refuses ptrace, as by a container's seccomp filter ({error})"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(held)


def _clock() -> Check:
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (AttributeError, OSError):
        return Check("clock", "cannot be asked on this system")
    if state != _UNSYNCHRONISED:
        return Check("clock", "synchronised")
    return Check(
        "clock",
        "not synchronised (adjtimex)",
        "spans of several hosts may be shifted against each other; report compares them through requests",
    )


def _engines() -> Check:
    from sgl_aspects.engines import find_engines

    versions = []
    for engine in find_engines():
        try:
            versions.append(f"{engine.name} {importlib.metadata.version(engine.name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return Check("engines", ", ".join(versions) or "the embedded one alone")


def _collectors_processor() -> Check:
    cores = len(os.sched_getaffinity(0))
    if cores > 1:
        return Check("processors", f"{cores}")
    return Check("processors", "one", "the collector competes with the engine for it")


CHECKS: tuple[Callable[[], Check], ...] = (
    _step_path,
    _shared_memory,
    _limits,
    _collectors_processor,
    _attaching,
    _clock,
    _engines,
)
