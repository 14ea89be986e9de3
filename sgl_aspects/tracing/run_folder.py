"""A run: the folder in which its processes record, and the collector process that empties it."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import sgl_aspects
from sgl_aspects import env
from sgl_aspects.errors import ConfigError
from sgl_aspects.tracing.export.variables import normalise
from sgl_aspects.tracing.settings import TraceSettings

CLOSING = "closing"

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


def write_private(path: Path, data: bytes) -> None:
    """A file of a run, as whole as it was before or as it is to be; of this user only, whatever the umask."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(data)
    temporary.replace(path)


# Starts the collector as nobody's child: an engine may kill whatever descends from it when it ends.
_LAUNCH = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until it can be asked to end
process_id = os.fork()
if process_id:
    os.write(int(sys.argv[1]), b"%d\\n" % process_id)
    os._exit(0)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class CollectorProcess:
    """The collector of one run, started by the run's first process.

    It outlives that process for as long as others of the run live, and its report comes through a pipe.
    """

    def __init__(self, folder: str, settings: TraceSettings, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._report, report_writer = os.pipe()
        try:
            collector = ["-m", "sgl_aspects.tracing.collector", folder, str(report_writer)]
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, str(report_writer), *collector],
                env=_collector_environment(settings, environment),
                pass_fds=(report_writer,),
                stdin=subprocess.DEVNULL,
                stdout=None if settings.prints() else subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the engine
                check=True,
            )
            digits = b""
            while not digits.endswith(b"\n"):
                digits += os.read(self._report, 1)
            self.process_id = int(digits)
        except BaseException:
            os.close(self._report)
            raise
        finally:
            os.close(report_writer)

    @property
    def has_ended(self) -> bool:
        return self._report < 0 or self._is_ending(0)

    def ask_to_end(self) -> None:
        """The run ends now, even if some of its processes live on."""
        with contextlib.suppress(OSError):
            Path(self._folder, CLOSING).touch(mode=0o600)

    def wait(self, seconds: float) -> str | None:
        """Its report once it has ended; None where it needs longer or ended without one."""
        if self._report < 0 or not self._is_ending(seconds):
            return None
        with open(self._report, encoding="utf-8") as report:
            self._report = -1
            return report.read() or None

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
    values["PYTHONSAFEPATH"] = "1"
    return values
