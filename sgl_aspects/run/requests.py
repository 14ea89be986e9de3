"""The one way in which a command asks a running process and gets its answer.

A request is a few files in a folder: ``KEY.request`` (the function to call and its values), ``KEY.py`` (the
script that does it, :mod:`sgl_aspects.run.entry`), ``KEY.taken`` once a thread in the process has begun (it
holds the thread's number), ``KEY.answer``. The process is made to run the script by its signal, if it was
prepared (:mod:`sgl_aspects.run.prepared`); `sgl-aspects attach` has other carriers for one that was not. No
process waits for requests, and an idle one takes them as well. What concerns steps is asked without a script:
a number in the ring's control block makes the process look before its next step (:func:`take_requests`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_aspects import env
from sgl_aspects.errors import AttachError, ConfigError
from sgl_aspects.files import read_small, unfollowed, write_private
from sgl_aspects.run import entry, prepared
from sgl_aspects.run.control import own_folder

# Runs the script in a new thread of the process; the function says whether it has started. Returns the
# seconds for which the main thread was stopped.
Carrier = Callable[[Path, Callable[[], bool]], float]

#: "on": commands may ask this process; a folder: those that name it; "off", or not set: none.
CONTROL_VARIABLE = "SGL_ASPECTS_OP_CONTROL"
_START_SECONDS = 10.0
_SIGNAL_SECONDS = 1.0
_LONGEST_ANSWER = 64 << 20  # bytes
#: Ends the names of files that are there once a process has done with a request.
DONE = (".answer", f".py{prepared.FAILED}")
_SUFFIXES = (".request", ".py", ".taken", *DONE)


@dataclass(frozen=True)
class Prepared:
    """A live process with a control block."""

    process_id: int
    control: Path

    def run_file(self, path: Path, has_started: Callable[[], bool]) -> float:
        """Run the Python file ``path`` in a new thread of the process. Stops nothing: returns 0.0 seconds."""
        begin, sent = time.monotonic(), 0
        while not has_started():
            seconds = time.monotonic() - begin
            if seconds > _START_SECONDS:
                raise AttachError(
                    f"process {self.process_id} has run no Python for {_START_SECONDS:g} s, so it could "
                    "not look at its control block; try again"
                )
            if seconds >= sent * _SIGNAL_SECONDS:  # again where another command has overwritten the block
                self._signal(path)
                sent += 1
            time.sleep(0.002)
        return 0.0

    def _signal(self, path: Path) -> None:
        with _opened(self.control.parent) as directory:
            if directory is None or not _is_locked(self.control.name, directory):
                raise ProcessLookupError(f"process {self.process_id} has ended")
            self.control.write_bytes(os.fsencode(path))
            os.kill(self.process_id, prepared.signal_number())


def prepare_from_environment() -> None:
    """Let commands ask this process, if the environment says so.

    :raises ConfigError: the folder cannot be made, or belongs to another user.
    """
    folder = env.text(CONTROL_VARIABLE)
    if folder not in (None, "off"):
        try:
            prepared.prepare("" if folder == "on" else str(folder))
        except OSError as error:
            raise ConfigError(f"{CONTROL_VARIABLE}={folder}: {error}") from error


def control_folder() -> Path:
    """Return the folder of the processes that were started with this environment, or with ``on``."""
    folder = env.text(CONTROL_VARIABLE)
    return Path(prepared.folder_of(os.geteuid()) if folder in (None, "on", "off") else str(folder))


def prepared_processes(folder: Path) -> list[Prepared]:
    """Return the live processes with a control block in the folder; blocks of dead ones are removed.

    :raises AttachError: the folder is another user's, or a link.
    """
    found, prefix = [], prepared.block_prefix()
    with _opened(folder) as directory:
        for name in sorted(os.listdir(directory)) if directory is not None else ():
            process_id = name.removeprefix(prefix)
            if process_id != name and process_id.isdecimal() and directory is not None:
                if _is_locked(name, directory):
                    found.append(Prepared(int(process_id), folder / name))
                else:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=directory)
    return found


def prepared_process(process_id: int, user: int) -> Prepared | None:
    """Return None unless the process was prepared by ``user``, and is still the same one."""
    path = Path(prepared.folder_of(user), f"{prepared.block_prefix()}{process_id}")
    with contextlib.suppress(AttachError), _opened(path.parent, user) as directory:
        if directory is not None and _is_locked(path.name, directory):
            return Prepared(process_id, path)
    return None


@contextlib.contextmanager
def _opened(folder: Path, user: int | None = None) -> Iterator[int | None]:
    """Give a descriptor of a folder that this or another user alone may write; None if there is none."""
    user = os.geteuid() if user is None else user
    try:
        directory = unfollowed(str(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise AttachError(f"{folder} is not a folder of yours: {error.strerror}") from error
    try:
        status = os.fstat(directory)
        if status.st_uid != user or status.st_mode & 0o022:
            raise AttachError(
                f"{folder} is not a folder of yours alone (user {status.st_uid}, mode "
                f"{stat.filemode(status.st_mode)}): name one that only you may write"
            )
        yield directory
    finally:
        os.close(directory)


def _is_locked(name: str, directory: int) -> bool:
    """Return whether the process of the block lives: to one that took over its id the signal may be fatal."""
    no_link = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(name, no_link, dir_fd=directory)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class Request:
    """One request to one process, whose files are in ``folder``.

    :param function: ``module:function``; it gets the values and returns the answer, both JSON objects.
    :param package: a folder with a copy of this package, to import the module from. None: the process calls
        its own, and answers ``{}`` if it has not imported that module.
    :param pause: seconds for which the process's other threads run before each module that is imported.
    """

    def __init__(
        self,
        folder: Path,
        process_id: int,
        function: str,
        values: Mapping[str, Any],
        *,
        package: Path | None = None,
        pause: float = 0.0,
    ) -> None:
        self.process_id = process_id
        self._folder, self._key = folder, f"{process_id}-{secrets.token_hex(8)}"
        self.taken = folder / f"{self._key}.taken"
        request = {
            **values,
            "function": function,
            "package": None if package is None else str(package),
            "pause": pause,
        }
        write_private(folder / f"{self._key}.request", json.dumps(request).encode())

    def carry(self, carrier: Carrier) -> float:
        """Make the process begin; returns the seconds for which its main thread was stopped."""
        source = Path(entry.__file__).read_text(encoding="utf-8")
        script = self.taken.with_suffix(".py")
        script.write_text(f"{source}\n\nenter({str(self._folder)!r}, {self._key!r})\n", encoding="utf-8")
        return carrier(script, self._has_started)

    def _has_started(self) -> bool:
        """:raises AttachError: the process cannot do it."""
        failure = self.taken.with_suffix(f".py{prepared.FAILED}")
        # The process's own, which may be anything; empty until it is written.
        if failure.exists() and (why := read_small(failure).decode(errors="replace")):
            hidden = "; it may have a file that is named like this module of Python's" * ("module" in why)
            raise AttachError(f"process {self.process_id} cannot do what it is asked: {why}{hidden}")
        return self.taken.exists()

    def read(self) -> dict[str, Any] | None:
        """Return the latest answer; None if there is none yet.

        :raises AttachError: what the process has put there is no answer.
        """
        path = self.taken.with_suffix(".answer")
        try:
            values: dict[str, Any] = json.loads(read_small(path, _LONGEST_ANSWER))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise AttachError(f"process {self.process_id} has given no answer: {path}: {error}") from error
        return values

    def answer(self, is_alive: Callable[[], bool], seconds: float) -> dict[str, Any]:
        """Wait for the answer; its ``error`` is what was raised.

        :raises AttachError: the process or its thread has ended, or takes longer.
        """
        answer, process = self.taken.with_suffix(".answer"), f"process {self.process_id}"
        deadline = time.monotonic() + seconds
        while True:
            if (values := self.read()) is not None:
                return values
            if not is_alive():
                raise AttachError(f"{process} ended meanwhile")
            self._has_started()
            thread = read_small(self.taken).decode(errors="replace")
            ours = Path(f"/proc/{self.process_id}/task/{thread}")
            if thread.isdecimal() and not ours.exists() and not answer.exists():
                raise AttachError(f"{process} has given no answer: the injected thread has ended")
            if time.monotonic() > deadline:
                raise AttachError(f"{process} has not answered for {seconds:g} s")
            time.sleep(0.005)

    def remove(self) -> None:
        """Remove the files."""
        for suffix in _SUFFIXES:
            self.taken.with_suffix(suffix).unlink(missing_ok=True)


def ask(
    processes: Iterable[Prepared], function: str, values: Mapping[str, Any], seconds: float
) -> list[dict[str, Any]]:
    """Ask prepared processes, and return their answers in this order: ``error`` is why there is none."""
    asked = [(one, Request(one.control.parent, one.process_id, function, values)) for one in processes]
    answers = []
    for one, request in asked:
        try:
            request.carry(one.run_file)
            answers.append(request.answer(Path(f"/proc/{one.process_id}").exists, seconds))
        except (AttachError, ProcessLookupError) as error:
            answers.append({"error": str(error)})
        finally:
            request.remove()
    return answers


@dataclass(frozen=True)
class Taken:
    """A request that this process has taken at a step, and answers as often as there is news."""

    folder: str
    key: str
    values: Mapping[str, Any]

    @property
    def is_withdrawn(self) -> bool:
        return not os.path.exists(os.path.join(self.folder, f"{self.key}.taken"))

    def answer(self, **answer: Any) -> None:
        if not self.is_withdrawn:
            entry.give(self.folder, self.key, answer)


def take_requests(folder: str) -> Iterator[Taken]:
    """Take what this process is asked in the run's folder.

    :raises OSError: the run has ended, or its folder is another user's, who chooses what is in it.
    """
    with own_folder(Path(folder)):
        for path in sorted(Path(folder).glob(f"{os.getpid()}-*.request")):
            if (values := entry.take(folder, path.stem)) is not None:
                yield Taken(folder, path.stem, values)
