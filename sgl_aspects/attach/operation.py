"""Attaching and detaching from the command's side: one run folder, its requests and their answers.

The folder of a run has a folder ``attach`` with: ``package`` (the modules to import), ``processes.json`` (the
processes attached to or about to be: written before anything is done), and the files of each request to a
process (:mod:`sgl_aspects.run.requests`).

    python -m sgl_aspects.attach.operation RUN_FOLDER [SOCKET]

is the guard, which detaches when the command is gone, however it ended. ``SOCKET`` is the number of the one
that leads to root's debugger, if any. Standard input is a pipe from the command: data means that it detached,
a bare end of file that it died.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import sgl_aspects
from sgl_aspects import isolated
from sgl_aspects.attach import injection, package
from sgl_aspects.attach.debugging import connection, use_debugger
from sgl_aspects.attach.process_tree import Process, read_process
from sgl_aspects.attach.rights import check, explained
from sgl_aspects.errors import AttachError
from sgl_aspects.files import write_private
from sgl_aspects.run.collector import collector_state
from sgl_aspects.run.folder import (
    begin_weaving,
    end_weaving,
    hold_run,
    make_run_folder,
    remove_run_folder,
    runs,
)
from sgl_aspects.run.requests import DONE, Request, prepared_process

FOLDER = "attach"
_PROCESSES = "processes.json"
_ANSWER_SECONDS = 300.0  # with many processes on few cores, weaving takes a minute
_PAUSE_SECONDS = 0.002
_RETRY_SECONDS = 2.0
_AGENT = "sgl_aspects.attach.agent:perform"
_FAREWELL = b"detached"
_Done = TypeVar("_Done")


@dataclass(frozen=True)
class Answer:
    """A process's answer, or why there is none. ``stood``: seconds for which its main thread was stopped."""

    process: Process
    values: Mapping[str, Any]
    stood: float = 0.0

    @property
    def error(self) -> str | None:
        return self.values.get("error")


class Run:
    """A run folder through which processes are attached to and detached from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own = folder / FOLDER
        self._guard: subprocess.Popen[bytes] | None = None

    @classmethod
    def make(cls) -> Run:
        """Begin a run, guarded from here on: it also ends if this process is killed."""
        run = cls(Path(make_run_folder(package.BYTES)))
        begin_weaving(run.folder)
        (run.folder / FOLDER).mkdir(mode=0o700)
        run._start_guard()
        return run

    def _start_guard(self) -> None:
        debugger = connection()
        shared = [] if debugger is None else [debugger.fileno()]
        self._guard = subprocess.Popen(
            isolated.python("sgl_aspects.attach.operation", str(self.folder), *map(str, shared)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=shared,
            start_new_session=True,
        )

    # -- attaching ------------------------------------------------------------------------------------------

    def prepare(self, processes: Sequence[Process]) -> None:
        """Copy the modules that the processes need."""
        for process in processes:
            package.bring(package.interpreter_of(process), self._own / "package")

    def attach(self, processes: Sequence[Process], environment: Mapping[str, str]) -> Iterator[Answer]:
        """Weave in all of them at once. Each answer names what was woven, or why nothing was.

        Requests count as whole from the moment when the last one is woven.
        """
        self._remember(processes)
        yield from self._ask(processes, "attach", environment)
        end_weaving(self.folder)

    def attached(self) -> list[Process]:
        """Return the live processes that were attached to."""
        try:
            known = json.loads((self._own / _PROCESSES).read_text())
        except FileNotFoundError:
            return []
        found = [read_process(process_id) for process_id, _ in known]
        return [
            process for process in found if process is not None and [process.id, process.started] in known
        ]

    def _remember(self, processes: Sequence[Process]) -> None:
        known = [[one.id, one.started] for one in (*self.attached(), *processes)]
        write_private(self._own / _PROCESSES, json.dumps(known).encode())

    # -- detaching ------------------------------------------------------------------------------------------

    def detach(self) -> list[Answer]:
        """Remove every hook from every process; afterwards the run's collector ends."""
        self._withdraw()
        # The last answer comes after the last ring is closed, when the collector would remove the folder.
        held = hold_run(str(self.folder))
        try:
            answers = list(self._ask(self.attached(), "detach", {}))
        finally:
            if held is not None:
                held.close()
        self._end_guard(is_done=not any(answer.error for answer in answers))
        return answers

    def discard(self) -> None:
        """Remove the folder of a run without a collector."""
        self._end_guard()
        remove_run_folder(str(self.folder))

    def abandon(self) -> None:
        """Clean up for the guard: the command was killed, at any stage."""
        if not self._own.exists():
            return
        deadline, left = time.monotonic() + _ANSWER_SECONDS, self.attached()
        while left:
            self._withdraw()
            failed = [answer.process.id for answer in self._ask(left, "detach", {}) if answer.error]
            if not failed or time.monotonic() > deadline:
                break
            time.sleep(_RETRY_SECONDS)  # such as for the end of a debugger
            left = [process for process in self.attached() if process.id in failed]
        deadline = time.monotonic() + _ANSWER_SECONDS
        # Processes that the command had started may still be writing; a collector removes the folder itself.
        while self.folder.exists() and collector_state(self.folder) is None:
            remove_run_folder(str(self.folder))
            if time.monotonic() > deadline:
                return
            time.sleep(0.1)

    def _withdraw(self) -> None:
        """Withdraw the requests that no process has taken yet, and wait for the others."""
        for request in self._own.glob("*.request"):
            request.unlink(missing_ok=True)
        deadline = time.monotonic() + _ANSWER_SECONDS
        for taken in list(self._own.glob("*.taken")):
            process = read_process(int(taken.name.split("-")[0]))
            while process is not None and not any(taken.with_suffix(end).exists() for end in DONE):
                if time.monotonic() > deadline or read_process(process.id) is None:
                    break
                time.sleep(0.02)

    def _end_guard(self, *, is_done: bool = True) -> None:
        """Stop the guard. ``is_done``: nothing is left for it; otherwise it retries once this one ends."""
        if self._guard is not None and is_done:
            with contextlib.suppress(BrokenPipeError):
                self._guard.communicate(_FAREWELL)
            self._guard = None

    # -- requests -------------------------------------------------------------------------------------------

    def _ask(
        self, processes: Sequence[Process], operation: str, environment: Mapping[str, str]
    ) -> Iterator[Answer]:
        """Start it in each process, one after the other, and yield the answers: all work at the same time."""
        begun = [
            (process, self._tried(process, self._begin, operation, environment)) for process in processes
        ]
        for process, started in begun:
            if isinstance(started, Answer):
                yield started
            else:
                yield self._tried(process, self._end, *started)

    def _tried(self, process: Process, do: Callable[..., _Done], *arguments: Any) -> _Done | Answer:
        try:
            return do(process, *arguments)
        except AttachError as error:
            return Answer(process, {"error": str(error)})
        except (ProcessLookupError, FileNotFoundError):
            what = f"the run {self.folder}" if read_process(process.id) else f"process {process.id}"
            return Answer(process, {"error": f"{what} has ended"})
        except PermissionError as error:
            return Answer(process, {"error": str(explained(process.id, error))})
        except OSError as error:  # a full disk
            return Answer(process, {"error": str(error)})

    def _begin(
        self, process: Process, operation: str, environment: Mapping[str, str]
    ) -> tuple[Request, float]:
        """Start a thread that does it; return the request, and for how long the main thread was stopped."""
        # In a run that another command began, the process has that command's modules.
        interpreter = package.known(package.interpreter_of(process), self._own / "package")
        prepared = prepared_process(process.id, os.geteuid())
        check(
            process.id,
            needs_ptrace=prepared is None and not interpreter.has_remote_exec,
            has_capability=connection() is not None,
        )
        values = {
            "operation": operation,
            "version": sgl_aspects.__version__,
            "environment": {**environment, "SGL_ASPECTS_TRACE_RUN": str(self.folder)},
        }
        request = Request(
            self._own, process.id, _AGENT, values, package=interpreter.folder, pause=_PAUSE_SECONDS
        )
        remote_exec = interpreter.executable if interpreter.has_remote_exec else None
        inject = partial(injection.run_file, process.id, remote_exec=remote_exec)
        return request, request.carry(inject if prepared is None else prepared.run_file)

    def _end(self, process: Process, request: Request, stood: float) -> Answer:
        """Wait for the answer."""
        values = request.answer(lambda: read_process(process.id) is not None, _ANSWER_SECONDS)
        return Answer(process, values, stood)


def run_of(process_id: int) -> Path | None:
    """Return the run through which a process, or another one of its engine, is attached to."""
    for folder in reversed(runs()):
        if process_id in {process.id for process in Run(folder).attached()}:
            return folder
    return None


def guard(folder: str, debugger: str | None = None) -> None:
    """Wait for the end of the command; detach unless it reported that it did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if debugger is not None:
        use_debugger(int(debugger))
    if sys.stdin.buffer.read() != _FAREWELL:
        Run(Path(folder)).abandon()


if __name__ == "__main__":
    guard(*sys.argv[1:])
