"""The collector process of a run: its state, its settings, and how it is started."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sgl_aspects import isolated
from sgl_aspects.errors import ConfigError
from sgl_aspects.files import OwnDescriptor, lock_holder, unfollowed, write_private
from sgl_aspects.run.folder import CLOSING

# Locked by the run's collector while it lives.
_LOCK = "collector.lock"

_SETTINGS = "collector.json"
# Prefixes of the environment: OpenTelemetry's variables and the tracer's, proxies, certificates.
_KEPT = (
    "OTEL_",
    "SGL_ASPECTS_TRACE",
    "SGL_ASPECTS_CONTROL_FROM",
    "ASPECTS_TRACE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "ALL_PROXY",
    "SSL_CERT_",
    "GRPC_",
)
# Secrets: such a variable, and a URL with a password or a query.
_SECRET_NAME = re.compile("HEADER|KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/\s]*@|://\S*\?")
_KEEPER = str(Path(__file__).with_name("keeper.py"))
_RESTARTED = "collector.restarted"


class CollectorState(NamedTuple):
    """The state of a run's collector: its process while it is alive, and whether one was killed."""

    process_id: int
    is_alive: bool
    was_restarted: bool

    @property
    def is_elsewhere(self) -> bool:
        """Return whether it lives where this process sees none of its processes: in another container."""
        return self.is_alive and not self.process_id

    def __str__(self) -> str:
        if not self.is_alive:
            return "not running"
        where = "in another container" if self.is_elsewhere else f"pid {self.process_id}"
        return where + (", restarted" if self.was_restarted else "")


def collector_state(folder: str | Path) -> CollectorState | None:
    """Read the state; None if the run has not had a collector."""
    try:
        with open(Path(folder, _LOCK), "rb", buffering=0, opener=unfollowed) as lock:
            holder = lock_holder(lock.fileno())
    except OSError:  # in another user's folder it may be anything
        return None
    return CollectorState(holder or 0, holder is not None, Path(folder, _RESTARTED).exists())


def take_run(folder: str) -> bool:
    """Make this process the run's collector until it ends; True if the run had one before.

    :raises ConfigError: the run has a live collector, is another user's, or does not exist.
    """
    path = Path(folder, _LOCK)
    is_restarted = path.exists()
    try:
        if (owner := os.stat(folder).st_uid) != os.geteuid():
            raise ConfigError(f"{folder}: the run is user {owner}'s: start its collector as that user")
        descriptor = unfollowed(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    except OSError as error:
        raise ConfigError(f"{folder}: there is no such run, or it has a collector ({error})") from error
    return is_restarted


def how_to_start(folder: str | Path) -> str:
    """Return the command that starts a collector again, and the variables that it needs."""
    # From / since Python imports from the current folder first, in which others may have put files.
    command = f"start it again with cd / && {sys.executable} -m sgl_aspects.collector {folder}"
    unsaved = [name for name, value in collector_settings(str(folder)).items() if value is None]
    return f"set {', '.join(unsaved)}, which are not saved, and {command}" if unsaved else command


def is_for_collector(name: str) -> bool:
    """Return whether an environment variable is one that a collector reads."""
    return name.upper().startswith(_KEPT)


def keep_collector_settings(folder: str, environment: Mapping[str, str]) -> None:
    """Save the variables that a collector of this run reads, for one that is restarted by hand.

    Of those that may be secrets the name alone.
    """
    kept = {
        name: None if _SECRET_NAME.search(name) or _SECRET_VALUE.search(value) else value
        for name, value in environment.items()
        if is_for_collector(name)
    }
    write_private(Path(folder, _SETTINGS), json.dumps(kept).encode())


def collector_settings(folder: str) -> dict[str, str | None]:
    """Return the saved variables, with None for a value that may be a secret; none once it ended in order.

    Only what this user saved: another user's settings would be followed with this one's rights. None either
    where the file is damaged.
    """
    try:
        with open(Path(folder, _SETTINGS), "rb", opener=unfollowed) as file:
            found = json.load(file) if os.fstat(file.fileno()).st_uid == os.geteuid() else {}
        return {name: value if value is None else str(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}


def forget_collector_settings(folder: str) -> None:
    """Delete the variables: the collector has ended in order."""
    with contextlib.suppress(OSError):  # on a file system that became read-only they stay
        Path(folder, _SETTINGS).unlink()


class CollectorProcess:
    """The collector of one run, started by the run's first process.

    It outlives that process as long as others of the run live; its report comes through a pipe.
    ``environment``: the collector's; ``prints``: one of its exporters writes to standard output.
    """

    def __init__(self, folder: str, environment: Mapping[str, str], prints: bool) -> None:
        is_frozen = getattr(sys, "frozen", False)  # it would start itself, without end
        if is_frozen or not os.path.exists(_KEEPER):
            what = f"{sys.executable} is a frozen program" if is_frozen else f"{_KEEPER} is in an archive"
            raise ConfigError(
                f"the trace collector needs a Python interpreter and files of this package, and {what}; "
                "set SGL_ASPECTS_RECORDER=sdk, which records without a collector"
            )
        self._folder = folder
        report, report_writer = os.pipe()
        self._report = OwnDescriptor(report)
        try:
            keep_collector_settings(folder, environment)
            mark = str(Path(folder, _RESTARTED))
            command = isolated.python("sgl_aspects.collector", folder, str(report_writer))
            subprocess.run(
                [sys.executable, "-I", "-S", _KEEPER, str(report_writer), mark, *command],
                env=environment,
                pass_fds=(report_writer,),
                stdin=subprocess.DEVNULL,
                stdout=None if prints else subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the engine
                check=True,
            )
        except BaseException as error:
            self._report.close()
            if isinstance(error, (OSError, subprocess.SubprocessError)):
                raise ConfigError(f"the trace collector cannot be started: {error}") from error
            raise
        finally:
            os.close(report_writer)  # otherwise the pipe would not end with the collector
        with open(report, "rb", buffering=0, closefd=False) as line:
            first = line.readline()
        if not first:
            self._report.close()
            raise ConfigError("the trace collector cannot be started: no process may be forked any more")
        self._process_id = int(first)

    @property
    def process_id(self) -> int:
        """Return the id of the running collector: one that is killed is restarted once."""
        state = collector_state(self._folder)
        return state.process_id if state is not None and state.is_alive else self._process_id

    @property
    def has_ended(self) -> bool:
        if self._report.is_open():
            return self._is_ending(0)
        state = collector_state(self._folder)
        return state is None or not state.is_alive

    def ask_to_end(self) -> None:
        """End the run now, even if some of its processes live on."""
        with contextlib.suppress(OSError):
            Path(self._folder, CLOSING).touch(mode=0o600)

    def wait(self, seconds: float) -> str | None:
        """Wait for its report; None if it takes longer or ended without one."""
        if not self.can_report or not self._is_ending(seconds):
            return None
        try:
            with open(self._report.number, encoding="utf-8", closefd=False) as report:
                return report.read() or None
        finally:
            self._report.close()

    @property
    def can_report(self) -> bool:
        """Return whether its pipe is open: a process that becomes a daemon closes all descriptors."""
        return self._report.is_open()

    def abandon(self) -> None:
        """Leave the collector to end by itself; this process no longer waits for it."""
        self._report.close()

    def _is_ending(self, seconds: float) -> bool:
        """Read the report, its last act; if there is none, the pipe ends with the process."""
        poll = select.poll()
        poll.register(self._report.number, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
