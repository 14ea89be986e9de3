"""Report files, one per process: its hooks, and what they did.

With ``SGL_ASPECTS_REPORT=FOLDER`` (`sgl-aspects run --report FOLDER`) each process writes its report when its
hooks are set up, when a command that reads the reports asks it, and when it ends. A process that is killed
leaves its latest one. A folder that cannot be written, or is full, is logged once per process; nothing else
happens.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from sgl_aspects import env
from sgl_aspects.errors import AttachError, ConfigError
from sgl_aspects.files import read_small, write_private
from sgl_aspects.run import prepared
from sgl_aspects.run.processes import stat_of
from sgl_aspects.run.requests import Prepared, ask, prepared_processes
from sgl_aspects.weaving import Report
from sgl_aspects.weaving import report as current_report

logger = logging.getLogger("sgl_aspects")

VARIABLE = "SGL_ASPECTS_REPORT"
SUFFIX = ".hooks.json"
_ANSWER_SECONDS = 20.0
_LONGEST = 64 << 20  # bytes of a report, in a folder of any user
_writer: _Writer | None = None
#: The plugins that failed in this process, each with its error.
failed_plugins: dict[str, str] = {}


@dataclass(frozen=True)
class ProcessReport:
    """The report of one process.

    :param ended: it was written when the process ended; otherwise when its hooks were set up, or when asked.
    :param failed_plugins: each with its error.
    """

    process_id: int
    command: str
    ended: bool
    report: Report
    failed_plugins: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of the report's file."""
        report = {
            "hooks": [hook._asdict() for hook in self.report.hooks],
            "stale": [stale._asdict() for stale in self.report.stale],
            "displaced": self.report.displaced,
        }
        return {**vars(self), "report": report}


def write_from_environment() -> None:
    """Write this process's report now, when asked, and at its end, if the environment names a folder."""
    global _writer
    folder = env.text(VARIABLE)
    if folder is not None:
        prepared.prepare_or_say()
        _writer = _Writer(Path(folder))


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Write this process's report again; the answer to a request of a command."""
    if _writer is not None:
        _writer.write(ended=False)
    return {}


class _Writer:
    """Keeps one file of one process up to date."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_complained = False
        self._begin()
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._start_again)

    def _begin(self) -> None:
        from multiprocessing import util

        self._rename()
        self.write(ended=False)
        # Before other finalizers remove their hooks, and in children of multiprocessing instead of atexit.
        util.Finalize(None, self._end, exitpriority=0)

    def _rename(self) -> None:
        self._path = self._folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        self._has_ended, self._lock = False, threading.Lock()

    def _start_again(self) -> None:
        from multiprocessing import util

        self._rename()
        util.register_after_fork(self, _Writer._begin)  # a forked child of multiprocessing has no finalizers

    def _end(self) -> None:
        self.write(ended=True)

    def write(self, *, ended: bool) -> None:
        with self._lock:
            if not self._has_ended:
                self._has_ended = ended
                self._write(ended=ended)

    def _write(self, *, ended: bool) -> None:
        # Without options, which may be secrets.
        command = " ".join(itertools.takewhile(lambda word: not word.startswith("--"), sys.orig_argv))
        found = ProcessReport(os.getpid(), command, ended, current_report(), failed_plugins)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_private(self._path, json.dumps(found.as_dict(), default=str).encode())
        except OSError as error:
            if not self._has_complained:
                logger.warning("no report of the hooks: %s=%s: %s", VARIABLE, self._folder, error.strerror)
            self._has_complained = True


def read_all(folder: str | Path) -> Iterator[ProcessReport]:
    """Yield every report in ``folder``; processes that live write theirs again first.

    :raises ConfigError: there is no such folder, or none of its files is a report.
    """
    files = sorted(Path(folder).glob(f"*{SUFFIX}"))
    if not files:
        raise ConfigError(
            f"{folder} holds no reports; make them with: sgl-aspects run --report {folder} -- COMMAND"
        )
    known = {int(first) for file in files if (first := file.name.split("-")[0]).isdecimal()}
    living: list[Prepared] = []
    with contextlib.suppress(AttachError):  # a forked child has no file before it ends, or is asked
        everyone = prepared_processes(Path(prepared.folder_of(os.geteuid())))
        living = [each for each in everyone if not known.isdisjoint(_lineage(each.process_id))]
    for one, told in zip(living, ask(living, f"{__name__}:answer", {}, _ANSWER_SECONDS)):
        if "error" in told:
            logger.warning("process %d: its latest report is shown: %s", one.process_id, told["error"])
    for file in sorted(Path(folder).glob(f"*{SUFFIX}")):
        try:
            found: ProcessReport = decoded(ProcessReport, json.loads(read_small(file, _LONGEST)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{file} is not a report of this version: {error!r}; delete it") from error
        yield found


def _lineage(process_id: int) -> Iterator[int]:
    """Yield the process, its parent, and so on."""
    with contextlib.suppress(OSError, ValueError):
        while process_id:
            yield process_id
            process_id = int(stat_of(f"/proc/{process_id}")[1])


def decoded(kind: Any, value: Any) -> Any:
    """Return the JSON ``value`` as the ``kind`` that it was before.

    :raises TypeError: it is none; other exceptions likewise.
    """
    outer, inner = get_origin(kind), get_args(kind)
    if outer is tuple:
        return tuple(decoded(inner[0], one) for one in value)
    if outer in (Mapping, dict):
        return {str(name): decoded(inner[1], one) for name, one in value.items()}
    if type(None) in inner:
        return None if value is None else decoded(inner[0], value)
    if issubclass(kind, Enum):
        return kind[value.rpartition(".")[2].upper()]
    if fields := get_type_hints(kind):
        values = value if isinstance(value, dict) else dict(zip(fields, value, strict=True))
        return kind(**{name: decoded(fields[name], one) for name, one in values.items()})
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
