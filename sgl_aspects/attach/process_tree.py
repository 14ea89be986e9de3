"""Finds the processes of an engine from any of them, through ``/proc``, touching nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_aspects.engines import find_engines
from sgl_aspects.errors import AttachError
from sgl_aspects.files import read_small
from sgl_aspects.run.processes import stat_of
from sgl_aspects.terminal import printable

# They run no engine code: multiprocessing's own, torch's compilers, and sgl-aspects' processes.
_HELPERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch._inductor.compile_worker",
    "sgl_aspects.collector",
    "sgl_aspects.attach",
)
_SPAWNED = ("multiprocessing.spawn", "--multiprocessing-fork")
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")
_TITLE = 60
_LONGEST = 1 << 14  # bytes of a command line: a process can make its own as long as its memory


@dataclass(frozen=True)
class Process:
    """A process as ``/proc`` shows it. ``started`` distinguishes it from a later one with the same id."""

    id: int
    parent: int
    started: int
    words: tuple[str, ...]

    @property
    def title(self) -> str:
        """Its command line, in short: its user's own text."""
        text = " ".join(self.words) or Path(f"/proc/{self.id}/comm").read_text(errors="replace").strip()
        text = printable(text).replace("\n", "\\n")
        return text if len(text) <= _TITLE else text[: _TITLE - 1] + "…"

    @property
    def is_spawned(self) -> bool:
        """Return whether multiprocessing started it, so that it belongs to its parent."""
        return any(mark in word for word in self.words for mark in _SPAWNED)

    @property
    def is_helper(self) -> bool:
        return any(mark in word for word in self.words for mark in _HELPERS)

    @property
    def is_python(self) -> bool:
        """Return whether the executable looks like Python; the mapped files are checked before attaching."""
        try:
            name = os.path.basename(os.readlink(f"/proc/{self.id}/exe"))
        except PermissionError:
            return True  # another user's: reported by name later, not skipped
        except OSError:
            return False  # a kernel thread, or gone
        return "python" in name


def read_process(process_id: int) -> Process | None:
    """Return None if there is no such process, or it is a zombie."""
    try:
        fields = stat_of(f"/proc/{process_id}")
        words = read_small(Path(f"/proc/{process_id}/cmdline"), _LONGEST)
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in "ZX":
        return None
    texts = words.decode("utf-8", "replace").split("\0")
    return Process(process_id, int(fields[1]), int(fields[19]), tuple(word for word in texts if word))


def engine_of(process: Process) -> str | None:
    """Return the engine that the process runs; None if its command line does not show it.

    Judged by the program (``-m MODULE``, a script, or the title that an engine set), not by other words of
    the command line.
    """
    names = _programs(process.words)
    for engine, pattern in _patterns().items():
        if any(pattern.search(name) for name in names):
            return engine
    return None


def _programs(words: Sequence[str]) -> list[str]:
    """Return the first word, an interpreter or a title, and the module or script, if any."""
    names = [os.path.basename(word) for word in words[:1]]
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            return [*names, next(rest, "")]
        if word == "-c":
            break
        if not word.startswith("-"):
            return [*names, os.path.basename(word)]
        if word in _WITH_VALUE:
            next(rest, None)
    return names


def engine_tree(process_id: int, *, is_wanted: bool = False) -> list[Process]:
    """Return the processes of the engine that ``process_id`` belongs to, parents first.

    ``is_wanted``: also accept a process that is not known to be an engine; then it is the process with its
    descendants. Raises ``AttachError`` if there is no such process or it is not an engine's.
    """
    processes = {process.id: process for process in _all_processes()}
    named = processes.get(process_id)
    if named is None:
        where = "" if processes else " in /proc, which is not mounted"
        raise AttachError(f"there is no process {process_id}{where}; name the id of a running one")
    if not named.is_python:
        raise AttachError(
            f"process {process_id} ({named.title}) is not Python: its executable is not an interpreter"
        )
    root = named
    is_engine = engine_of(root) is not None
    while (parent := processes.get(root.parent)) is not None and parent.is_python and not parent.is_helper:
        if engine_of(parent) is None and not root.is_spawned:
            break
        root = parent
        is_engine = is_engine or engine_of(root) is not None
    if not is_engine and not is_wanted:
        known = ", ".join(sorted(engine.name for engine in find_engines()))
        raise AttachError(
            f"process {process_id} ({named.title}) is not known to be an engine ({known}): "
            "name a configuration with --config FILE, or add --force"
        )
    descent = _descent(root if is_engine else named, list(processes.values()))
    if not (found := [one for one in descent if one.is_python and not one.is_helper]):
        raise AttachError(f"process {process_id} has ended")
    return found


def _descent(root: Process, processes: Sequence[Process]) -> list[Process]:
    """Return the process and its descendants; each once, whatever was seen of processes that come and go."""
    found = [root]
    for parent in found:
        found += [each for each in processes if each.parent == parent.id and each not in found]
    return found


def _all_processes() -> Iterator[Process]:
    for name in sorted((name for name in os.listdir("/proc") if name.isdecimal()), key=int):
        process = read_process(int(name))
        if process is not None:
            yield process


def _patterns() -> dict[str, re.Pattern[str]]:
    """Return each engine's package name, as in words such as ``python -m package.server``."""
    patterns = {}
    for engine in find_engines():
        packages = {
            target.split(":")[0].split(".")[0] for role in engine.roles.values() for target in role.targets
        }
        own = [name for name in packages if name.startswith(engine.name) or name == "sgl_aspects"] or [
            engine.name
        ]
        names = "|".join(re.escape(name).replace("_", "[-_]") for name in sorted(own))
        patterns[engine.name] = re.compile(rf"(?:^|[\s/:])(?:{names})(?:$|[\s.:/])", re.IGNORECASE)
    return patterns
