"""A run: the folder in which its processes record, and the collector process that empties it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

import sgl_aspects
from sgl_aspects import env
from sgl_aspects.errors import ConfigError
from sgl_aspects.files import write_private
from sgl_aspects.tracing.export.variables import normalise
from sgl_aspects.tracing.settings import TraceSettings

CLOSING = "closing"
#: Locked by the run's collector, which writes its process id there.
LOCK = "collector.lock"

# Locked, shared, by every process of the run that may still record.
_HELD = "held"
_SETTINGS = "collector.json"
# Of the environment: OpenTelemetry's variables and ours, proxies, and where certificates are.
_KEPT = (
    "OTEL_",
    "SGL_ASPECTS_",
    "ASPECTS_",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "ALL_PROXY",
    "SSL_CERT_",
    "GRPC_",
)
_KEEPER = str(Path(__file__).with_name("collector") / "keeper.py")
_RESTARTED = "collector.restarted"

_LEAST_BYTES = 4 << 20
_LEAST_FILES = 64


def make_run_folder() -> str:
    """A new folder that only this user may enter: in memory where the system has such a place, with room.

    Raises ``ConfigError`` where there is no place for it.
    """
    for parent in ("/dev/shm", env.text("XDG_RUNTIME_DIR")):
        if parent and os.path.isabs(parent) and os.access(parent, os.W_OK | os.X_OK):
            with contextlib.suppress(OSError):
                if _has_room(parent):
                    return tempfile.mkdtemp(prefix="sgl-aspects-", dir=parent)
    try:
        return tempfile.mkdtemp(prefix="sgl-aspects-")
    except OSError as error:
        raise ConfigError(
            "tracing has no folder for its records: /dev/shm, XDG_RUNTIME_DIR and the temporary folder "
            f"cannot be written ({error}); set TMPDIR to a folder that can"
        ) from error


def _has_room(folder: str) -> bool:
    """Whether the rings of some processes go in; a file system that counts no files gives 0 for all."""
    system = os.statvfs(folder)
    has_files = not system.f_files or system.f_favail >= _LEAST_FILES
    return has_files and system.f_bavail * system.f_frsize >= _LEAST_BYTES


def remove_run_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def hold_run(folder: str) -> int | None:
    """A descriptor that keeps the run from ending for as long as it is open, here or in a forked child.

    None where the run has ended, or is about to.
    """
    descriptor = _locked(folder, fcntl.LOCK_SH)
    if descriptor is not None and Path(folder, CLOSING).exists():
        os.close(descriptor)
        return None
    return descriptor


def seal_run(folder: str) -> int | None:
    """A descriptor while which is open no process can hold the run; None where one does."""
    return _locked(folder, fcntl.LOCK_EX)


def _locked(folder: str, kind: int) -> int | None:
    try:
        descriptor = os.open(Path(folder, _HELD), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


class CollectorState(NamedTuple):
    """The collector of a run: its latest process, whether that lives, and whether one before was killed."""

    process_id: int
    is_alive: bool
    was_restarted: bool

    def __str__(self) -> str:
        if not self.is_alive:
            return "not running"
        return f"pid {self.process_id}" + (", restarted" if self.was_restarted else "")


def collector_state(folder: str | Path) -> CollectorState | None:
    """None where the run has not had a collector."""
    try:
        descriptor = os.open(Path(folder, LOCK), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        process_id = int(os.read(descriptor, 32) or b"0")
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_alive = False
        except OSError:
            is_alive = True
    finally:
        os.close(descriptor)
    return CollectorState(process_id, is_alive, Path(folder, _RESTARTED).exists())


def how_to_start(folder: str | Path) -> str:
    """What to write to start a collector again by hand."""
    return f"start it again with {sys.executable} -m sgl_aspects.tracing.collector {folder}"


def keep_collector_settings(folder: str, environment: Mapping[str, str]) -> None:
    """Saves the variables that a collector of this run reads, for one that is started again by hand."""
    kept = {name: value for name, value in environment.items() if name.upper().startswith(_KEPT)}
    write_private(Path(folder, _SETTINGS), json.dumps(kept).encode())


def use_collector_settings(folder: str, environment: MutableMapping[str, str]) -> None:
    """Puts what was saved into ``environment``, where it does not say otherwise itself."""
    with contextlib.suppress(FileNotFoundError):
        for name, value in json.loads(Path(folder, _SETTINGS).read_bytes()).items():
            environment.setdefault(name, value)


def forget_collector_settings(folder: str) -> None:
    """Headers among them may be secrets: they go with the run, also where its folder is kept."""
    Path(folder, _SETTINGS).unlink(missing_ok=True)


class CollectorProcess:
    """The collector of one run, started by the run's first process.

    It outlives that process for as long as others of the run live, and its report comes through a pipe.
    """

    def __init__(self, folder: str, settings: TraceSettings, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._report, report_writer = os.pipe()
        try:
            values = _collector_environment(settings, environment)
            keep_collector_settings(folder, values)
            mark = str(Path(folder, _RESTARTED))
            command = [sys.executable, "-m", "sgl_aspects.tracing.collector", folder, str(report_writer)]
            subprocess.run(
                [sys.executable, "-I", "-S", _KEEPER, str(report_writer), mark, *command],
                env=values,
                pass_fds=(report_writer,),
                stdin=subprocess.DEVNULL,
                stdout=None if settings.prints() else subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the engine
                check=True,
            )
        except BaseException as error:
            os.close(self._report)
            if isinstance(error, (OSError, subprocess.SubprocessError)):
                raise ConfigError(f"the trace collector cannot be started: {error}") from error
            raise
        finally:
            os.close(report_writer)  # without it the pipe ends with the collector
        digits = b""
        while not digits.endswith(b"\n"):
            if not (digit := os.read(self._report, 1)):
                os.close(self._report)
                raise ConfigError("the trace collector cannot be started: no process may be forked any more")
            digits += digit
        self._process_id = int(digits)

    @property
    def process_id(self) -> int:
        """Of the one that runs now: one that was killed is started again, once."""
        state = collector_state(self._folder)
        return state.process_id if state is not None and state.was_restarted else self._process_id

    @property
    def has_ended(self) -> bool:
        if self._report >= 0:
            return self._is_ending(0)
        state = collector_state(self._folder)
        return state is None or not state.is_alive

    def ask_to_end(self) -> None:
        """The run ends now, even if some of its processes live on."""
        with contextlib.suppress(OSError):
            Path(self._folder, CLOSING).touch(mode=0o600)

    def wait(self, seconds: float) -> str | None:
        """Its report once it has ended; None where it needs longer or ended without one."""
        if self._report < 0 or not self._is_ending(seconds):
            return None
        descriptor, self._report = self._report, -1
        try:
            with open(descriptor, encoding="utf-8") as report:
                return report.read() or None
        except OSError:  # a daemon closes all descriptors
            return None

    def abandon(self) -> None:
        """Leaves it to end by itself; this process no longer waits for it."""
        if self._report >= 0:
            os.close(self._report)
            self._report = -1

    def _is_ending(self, seconds: float) -> bool:
        """Its report is the last that it does; without one the pipe ends with the process."""
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        return bool(poll.poll(seconds * 1000))


def _collector_environment(settings: TraceSettings, environment: Mapping[str, str]) -> dict[str, str]:
    values = {**environment, **settings.overrides()}
    normalise(values)
    values.pop(env.spelled("SGL_ASPECTS_TRACE_RUN", values), None)
    # The collector is not traced itself, and finds this package even where it is not installed.
    values["SGL_ASPECTS_TRACE"] = "off"
    root = str(Path(sgl_aspects.__file__).parent.parent)
    values["PYTHONPATH"] = os.pathsep.join(filter(None, [values.get("PYTHONPATH"), root]))
    values.pop(env.spelled("SGL_ASPECTS_RUN", values), None)  # plugins are for the engine's processes
    values["PYTHONSAFEPATH"] = "1"
    return values
